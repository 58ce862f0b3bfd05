"""Tools: the commands of `sglang-dflash`, except `train`.

`check` checks an installation or a launch, `recipe` prints launches, `bench` measures speed, `prove` tests on the
machine at hand, and `demo` shows a server at work. `models` writes SmolLM2 as a checkpoint, `mlx` answers a prompt with
MLX, and `pages` prints documentation. `capacity` divides a card's memory for `check`. This wing imports all wings
below.
"""

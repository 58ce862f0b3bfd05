"""Tools: the commands of a person.

`check` checks an installation or a launch, `recipe` prints launches, `capacity` divides a card's memory, `bench`
measures, `prove` tests on the machine at hand, and `demo` shows a server at work. `sglang-dflash COMMAND` runs each of
them. This wing imports all wings below, but not `train`.
"""

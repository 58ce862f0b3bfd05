"""Program that trains against an in-process `sglang.Engine`, as verl does, and writes what each rollout returned.

    python -m tests.server.lib.rollouts '{"fields": {"model_path": ...}, "prompts": [[5, 6]], "n_new": 8, ...}' FILE

In each round it releases the engine's memory, resumes the weights, pushes new ones in buckets, and resumes the rest.
Weights of round i are those of the folders `weights[i]`: target, then draft.
"""

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

N_PER_BUCKET = 8  # tensors of a push


def main(order: str, report: str) -> None:
    import sglang

    asked = json.loads(order)
    engine = sglang.Engine(**asked["fields"])
    try:
        rounds = [rollout(engine, asked, weights) for weights in asked["weights"]]
    finally:
        engine.shutdown()
    Path(report).write_text(json.dumps(rounds))


def rollout(engine: Any, asked: dict[str, Any], weights: list[str]) -> list[dict[str, Any]]:
    """Return tokens, log-probabilities and counts of steps of each answer with new weights."""
    engine.release_memory_occupation(tags=["kv_cache", "weights"])
    engine.resume_memory_occupation(tags=["weights"])
    for folder, selector in zip(weights, ("target", "draft"), strict=True):
        push(engine, folder, selector)
    engine.resume_memory_occupation(tags=["kv_cache"])
    engine.flush_cache()
    sampling = {"temperature": 0, "max_new_tokens": asked["n_new"]}
    answers = engine.generate(input_ids=asked["prompts"], sampling_params=sampling, return_logprob=True)
    return [
        {
            "tokens": answer["output_ids"],
            "logprobs": [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]],
            "accepted": answer["meta_info"]["spec_correct_drafts_histogram"],
        }
        for answer in answers
    ]


def push(engine: Any, folder: str, selector: str) -> None:
    """Push a checkpoint. `Engine.update_weights_from_tensor` has no selector, and pushes to the target here."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    engine.begin_weight_update(selector)
    named = list(load_file(f"{folder}/model.safetensors").items())
    for first in range(0, len(named), N_PER_BUCKET):
        tensors = engine._serialize_tensors_per_rank(named[first : first + N_PER_BUCKET], None)
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=tensors, selector=selector, flush_cache=False
        )
        pushed = engine.loop.run_until_complete(engine.tokenizer_manager.update_weights_from_tensor(request, None))
        assert pushed[0], pushed
    engine.end_weight_update()


if __name__ == "__main__":
    main(*sys.argv[1:])

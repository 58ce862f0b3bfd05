"""Invalid requests, and requests with extreme valid values, as paths and bodies."""

from typing import Any, NamedTuple

PROMPT = [5, 6, 7]
MESSAGES = [{"role": "user", "content": "Spell the words candle and castle."}]
GREEDY = {"temperature": 0, "max_new_tokens": 8}


class Bad(NamedTuple):
    path: str
    body: Any  # JSON value; bytes are sent unchanged

    @property
    def content(self) -> dict[str, Any]:
        """Arguments of `httpx.post` that send the body."""
        if isinstance(self.body, bytes):
            return {"content": self.body, "headers": {"Content-Type": "application/json"}}
        return {"json": self.body}


def sampling(**asked: Any) -> Bad:
    return Bad("/generate", {"input_ids": PROMPT, "sampling_params": GREEDY | asked})


def fields(**asked: Any) -> Bad:
    return Bad("/generate", {"sampling_params": GREEDY} | asked)


def chat(**asked: Any) -> Bad:
    return Bad(
        "/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 8} | asked
    )


def completion(**asked: Any) -> Bad:
    return Bad("/v1/completions", {"model": "tiny", "prompt": "Spell", "temperature": 0, "max_tokens": 8} | asked)


# Invalid or extreme sampling parameters for `/generate`. min_new_tokens 9 exceeds the max_new_tokens 8 of `GREEDY`.
SAMPLING_VALUES: dict[str, tuple[Any, ...]] = {
    "temperature": (-1, "warm"), "top_p": (0, 2), "min_p": (2,), "max_new_tokens": (-1, 0, "many"),
    "min_new_tokens": (9, -1), "frequency_penalty": (3,), "presence_penalty": (-3,), "repetition_penalty": (0,),
    "logit_bias": ({"1024": 1.0}, {"-1": 1.0}, {"one": 1.0}), "sampling_seed": ("dice",), "n": (0, -1), "stop": (5,),
    "stop_token_ids": (["end"],), "temprature": (0,), "regex": ("([",), "json_schema": ("{", '{"type": "feather"}'),
    "ebnf": ("root ::= ",), "structural_tag": ("{}",),
}  # fmt: skip
SAMPLING = {
    f"{name} {value}": sampling(**{name: value}) for name, values in SAMPLING_VALUES.items() for value in values
}
SAMPLING |= {f"top_k {value}": sampling(top_k=value, temperature=1) for value in (-5, 0)}
SAMPLING["two grammars"] = sampling(regex="[a-z]+", json_schema='{"type": "object"}')
# Other invalid or extreme `/generate` requests.
REQUESTS = {
    "json-broken": Bad("/generate", b'{"input_ids": [5, 6'),
    "json-list": Bad("/generate", []),
    "json-empty": Bad("/generate", {}),
    "body-empty": Bad("/generate", b""),
    "input_ids-empty": fields(input_ids=[]),
    "input_ids-text": fields(input_ids=["five"]),
    "input_ids-too-long": fields(input_ids=[5] * 5000),
    "input_ids-at-context": fields(input_ids=[5] * 4096),
    "input_ids-past-input-limit": fields(input_ids=[5] * 4092),
    "total-past-context": Bad(
        "/generate", {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 5000}}
    ),
    "text-number": fields(text=5),
    "text-and-input_ids": fields(text="Spell", input_ids=PROMPT),
    "sampling_params-list": Bad("/generate", {"input_ids": PROMPT, "sampling_params": [1, 2]}),
    "lora-unknown": fields(input_ids=PROMPT, lora_path="none-such"),
    "stream-text": fields(input_ids=PROMPT, stream="perhaps"),
    "top_logprobs-text": fields(input_ids=PROMPT, return_logprob=True, top_logprobs_num="all"),
    "token_ids_logprob-past-vocabulary": fields(input_ids=PROMPT, return_logprob=True, token_ids_logprob=[5000]),
    "session-unknown": fields(input_ids=PROMPT, session_params={"id": "none-such"}),
}
BROKEN_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "feather"}}}
CHAT_VALUES: dict[str, tuple[Any, ...]] = {
    "messages": ([], "hello", [{"role": "wizard", "content": "hello"}], [{"role": "user", "content": ""}]),
    "model": ("none-such",), "n": (0,), "temperature": (-1,), "top_p": (2,), "max_tokens": (-1, 0), "stop": (5,),
    "logit_bias": ({"4000": 1},), "response_format": ({"type": "poem"}, BROKEN_SCHEMA), "tool_choice": ("required",),
}  # fmt: skip
OPENAI = {f"chat {name} {value}": chat(**{name: value}) for name, values in CHAT_VALUES.items() for value in values} | {
    "chat-messages-missing": Bad("/v1/chat/completions", {"model": "tiny"}),
    "chat-too-long": chat(messages=[{"role": "user", "content": "apple " * 5000}]),
    "chat-json-broken": Bad("/v1/chat/completions", b'{"model": '),
    "completion-prompt-missing": Bad("/v1/completions", {"model": "tiny"}),
    "completion-prompt-empty-list": completion(prompt=[]),
    "completion-n-zero": completion(n=0),
    "completion-best_of-text": completion(best_of="two"),
}
# Requests of the next three dictionaries crash a server without the plugin, except for those in `OUTLIVED`.
NO_PROMPT = {
    "text-empty": fields(text=""),
    "text-empty-beside-another": fields(text=["Spell", ""]),
    "input_ids-empty-beside-others": fields(input_ids=[PROMPT, []]),
    "text-empty-of-no-session": fields(text="", session_params={"id": None, "offset": -5}),
    "completion-prompt-empty": completion(prompt=""),
}
NO_TOKEN = {
    "input_ids-past-vocabulary": fields(input_ids=[*PROMPT, 999999]),
    "input_ids-first-past-vocabulary": fields(input_ids=[5, 1024]),
    "input_ids-negative": fields(input_ids=[5, -1, 6]),
    "input_ids-nested-past-vocabulary": fields(input_ids=[PROMPT, [5, 1024]]),
    "input_ids-of-n": Bad("/generate", {"input_ids": [1024], "sampling_params": GREEDY | {"n": 2}}),
    "completion-prompt-past-vocabulary": completion(prompt=[5, 1024]),
    "completion-prompts-past-vocabulary": completion(prompt=[PROMPT, [1024]]),
}
NO_PARAMETER = {
    "top_k-past-int32": sampling(top_k=2**31, temperature=1),
    "top_k-past-int64": sampling(top_k=2**63, temperature=1),
    "logit_bias-past-fp32": sampling(logit_bias={"5": 1e308}, temperature=1),
    "temperature-past-fp32": sampling(temperature=1e308, regex="(yes|no)"),
    "repetition_penalty-of-no-size": sampling(repetition_penalty=1e-320, temperature=1),
    "stop_token_ids-past-vocabulary": sampling(stop_token_ids=[999999]),
    "stop_token_ids-negative": sampling(stop_token_ids=[-5], min_new_tokens=4),
    "top_logprobs-past-vocabulary": fields(input_ids=PROMPT, return_logprob=True, top_logprobs_num=1025),
    "chat-top_logprobs-past-vocabulary": chat(logprobs=True, top_logprobs=10000),
    "completion-logprobs-past-vocabulary": completion(logprobs=10**6),
    "logprob_start_len-minus-two": fields(input_ids=PROMPT, return_logprob=True, logprob_start_len=-2),
    "return_hidden_states-list": fields(input_ids=PROMPT, return_hidden_states=[]),
    "lora_id-list": fields(input_ids=PROMPT, lora_id=[]),
    "positional_embed_overrides": fields(input_ids=PROMPT, positional_embed_overrides={"a": 1}),
}
# Crashes a server with `--enable-metrics`; other servers accept it.
NO_LABEL = {"custom_labels-unknown": fields(input_ids=PROMPT, custom_labels={"team": "a"})}
# Without the plugin these exhaust the machine's memory, so no test sends them to such a server.
TOO_MANY = {
    "n-past-memory": sampling(n=2**31),
    "n-of-several-prompts": Bad("/generate", {"input_ids": [PROMPT] * 64, "sampling_params": GREEDY | {"n": 1025}}),
    "chat-n-past-memory": chat(n=2**40),
    "completion-n-past-memory": completion(n=2**16 + 1),
}
# SGLang on a CPU survives these. It answers an empty prompt if the request has another prompt too. From NaN it samples
# token 0. It reads stop ids only if a request of the batch has min_new_tokens. Its OpenAI API refuses an empty string.
OUTLIVED = {
    "text-empty-beside-another", "input_ids-empty-beside-others", "completion-prompt-empty", "logit_bias-past-fp32",
    "temperature-past-fp32", "repetition_penalty-of-no-size", "stop_token_ids-past-vocabulary",
}  # fmt: skip
KINDS = {**SAMPLING, **REQUESTS, **OPENAI, **NO_PROMPT, **NO_TOKEN, **NO_PARAMETER, **TOO_MANY}
# Requests of one prompt that no front end stops if the tokenizing process checks nothing, with the scheduler's answer.
HARMFUL = {
    "text-empty": (NO_PROMPT["text-empty"], "the prompt has no tokens"),
    "input_ids-past-vocabulary": (NO_TOKEN["input_ids-past-vocabulary"], "input_ids has 999999"),
    "input_ids-negative": (NO_TOKEN["input_ids-negative"], "input_ids has -1"),
    "top_k-past-int32": (NO_PARAMETER["top_k-past-int32"], "top_k is 2147483648"),
    "logit_bias-past-fp32": (NO_PARAMETER["logit_bias-past-fp32"], "logit_bias of 5 is "),
    "temperature-past-fp32": (NO_PARAMETER["temperature-past-fp32"], "temperature is "),
    "repetition_penalty-of-no-size": (NO_PARAMETER["repetition_penalty-of-no-size"], "repetition_penalty is "),
    "stop_token_ids-negative": (NO_PARAMETER["stop_token_ids-negative"], "stop_token_ids has -5"),
    "top_logprobs-past-vocabulary": (NO_PARAMETER["top_logprobs-past-vocabulary"], "top_logprobs_num .* is 1025"),
    "logprob_start_len-minus-two": (NO_PARAMETER["logprob_start_len-minus-two"], "logprob_start_len is -2"),
    "return_hidden_states-list": (NO_PARAMETER["return_hidden_states-list"], r"return_hidden_states is \[\]"),
}

"""Choice: each of B x N slots must be sampled as SGLang's own functions sample a single row of logits."""

from array import array
from collections.abc import Iterator
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers import sampler
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
)
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_dflash_kernels.accept import accept_ref

from sglang_dflash.engine.stages import choice as choice_module
from sglang_dflash.engine.stages.choice import Choice
from sglang_dflash.engine.stages.greedy import Whole
from sglang_dflash.engine.stages.processors import Processors
from sglang_dflash.engine.stages.sampling import over_slots
from sglang_dflash.engine.step import Block, Plan, Target

V, N = 50, 4
WHOLE = 1 << 30  # SGLang's top_k for the whole vocabulary


@pytest.fixture(scope="module", autouse=True)
def sampler_on_cpu() -> Iterator[None]:
    """Run SGLang's sampler with its torch backend, which supports seeds.

    SGLang's hash of seed, position and column needs compiled operators, so another hash replaces it.
    """
    settings = SimpleNamespace(
        deterministic=SimpleNamespace(rl_on_policy_target=None, enable_deterministic_inference=False),
        kernel=SimpleNamespace(sampling_backend="pytorch"),
        features=SimpleNamespace(sampling_mask_max_tokens=V),
    )

    def hashed(seed_T: torch.Tensor, positions_T: torch.Tensor, columns_V: torch.Tensor) -> torch.Tensor:
        key_TV = seed_T.to(torch.int64)[:, None] * 2654435761 + positions_T[:, None] * 40503 + columns_V
        key_TV = (key_TV % 2**31) * 2246822519 % 2**32
        return (key_TV ^ (key_TV >> 15)) * 1103515245 % 2**32

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "murmur_hash32", hashed)
        patch.setattr(sampler, "get_exec", lambda: settings)
        patch.setattr(sampler, "get_parallel", lambda: SimpleNamespace(tp_group=SimpleNamespace(device_group=None)))
        patch.setattr(sampler, "is_dp_attention_enabled", lambda: False)
        yield


def info_of(rows: list[dict[str, Any]], **fields: Any) -> SamplingBatchInfo:
    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row.get(name, default) for row in rows], dtype=dtype)

    top_ks = column("top_k", WHOLE, torch.int32)
    return SamplingBatchInfo(
        temperatures=column("temperature", 1.0, torch.float32)[:, None],
        top_ps=column("top_p", 1.0, torch.float32),
        top_ks=top_ks,
        min_ps=column("min_p", 0.0, torch.float32),
        sampling_seed=column("seed", 42, torch.int64),
        is_all_greedy=bool((top_ks <= 1).all()),
        is_any_greedy=bool((top_ks <= 1).any()),
        need_top_p_sampling=any("top_p" in row for row in rows),
        need_top_k_sampling=any("top_k" in row for row in rows),
        need_min_p_sampling=any("min_p" in row for row in rows),
        vocab_size=V,
        device="cpu",
        **fields,
    )


def draw(logits_TV: torch.Tensor, info: SamplingBatchInfo, positions_T: torch.Tensor) -> list[int]:
    """Draw one token per row with SGLang's sampler, which overwrites the logits that it gets."""
    output = LogitsProcessorOutput(next_token_logits=logits_TV.clone())
    return Sampler()(output, info, False, [], [], positions_T).tolist()


ONE_RANK = SimpleNamespace(world_size=1)


def make_choice(ranks: Any = ONE_RANK, logits: Whole | None = None) -> Choice:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice_module, "get_dp_tp_group", lambda: ranks)
        runner: Any = SimpleNamespace(sampler=Sampler(), device="cpu", model_config=SimpleNamespace(vocab_size=V))
        return Choice(runner, logits or Whole())


def batch_of(info: SamplingBatchInfo, *reqs: Any, return_logprob: bool = False) -> Any:
    asked = {"return_logprob": return_logprob, "has_grammar": False}
    return SimpleNamespace(reqs=list(reqs), sampling_info=info, device="cpu", **asked)


def request(prompt: list[int], **sampling: Any) -> Req:
    return Req("r", "", array("q", prompt), SamplingParams(**sampling), vocab_size=V)


def chosen(choice: Choice, batch: Any, logits_BNV, prefix_lens, tokens_BN=None, *, grammar_tree=None) -> torch.Tensor:
    """Return the target tokens of a step, int64 [B, N]. Edits the logits in place and sets `batch.output`."""
    tokens_BN = torch.zeros(logits_BNV.shape[:2], dtype=torch.int64) if tokens_BN is None else tokens_BN
    prefix_len_B = torch.tensor(prefix_lens)
    nothing = None
    positions_BN = prefix_len_B[:, None] + torch.arange(tokens_BN.shape[1])
    block = Block(tokens_BN, positions_BN, nothing, nothing, nothing, 0, nothing)
    plan = Plan(nothing, block, prefix_len_B, nothing, nothing)
    batch.output = LogitsProcessorOutput(next_token_logits=logits_BNV.flatten(0, 1))
    run = SimpleNamespace(logits_output=batch.output)
    batch.has_grammar = grammar_tree is not None
    return choice.choose(batch, plan, tokens_BN, Target(run, nothing, grammar_tree), None)


PARAMETERS = {
    "temperature": st.sampled_from([0.3, 1.0, 2.0]),
    "top_k": st.sampled_from([1, 3, 20, WHOLE]),
    "top_p": st.sampled_from([0.3, 0.9, 1.0]),
    "seed": st.integers(0, 2**40),
}


@given(st.lists(st.fixed_dictionaries({}, optional=PARAMETERS), min_size=1, max_size=4), st.integers(0, 10**6))
@settings(max_examples=40)
def test_every_slot_draws_as_its_request_would_alone(rows, torch_seed):
    """Compare a mixed batch with each request alone: with a seed, a draw depends on seed and position only."""
    torch.manual_seed(torch_seed)
    logits_BNV = 3 * torch.randn(len(rows), N, V)
    prefix_lens = torch.randint(0, 900, (len(rows),)).tolist()
    together_BN = chosen(make_choice(), batch_of(info_of(rows)), logits_BNV.clone(), prefix_lens)
    names = {name for row in rows for name in row}
    for b, slot in product(range(len(rows)), range(N)):
        # SGLang selects its sampling function, with or without top-k and top-p, per batch. So a request alone must set
        # every parameter that the mixed batch sets.
        alone = {"temperature": 1.0, "top_p": 1.0, "top_k": WHOLE} | rows[b]
        info = info_of([{name: value for name, value in alone.items() if name in names}])
        position = torch.tensor([prefix_lens[b] + slot])
        assert draw(logits_BNV[b, slot : slot + 1], info, position) == [together_BN[b, slot]]


@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize("n_rows", [1, 3, 8])
def test_chunks_of_rows_draw_as_all_rows_at_once(n_rows, keep_logits, monkeypatch):
    """Three requests of four slots, with seeds and different parameters, in chunks of `n_rows` rows."""
    torch.manual_seed(0)
    info = info_of([{"top_p": 0.9, "seed": 1}, {"temperature": 2.0, "top_p": 0.5, "seed": 2}, {"top_k": 9, "seed": 3}])
    logits_BNV = 3 * torch.randn(3, N, V)
    want_BN = chosen(make_choice(), batch_of(info), logits_BNV.clone(), [5, 9, 2])
    monkeypatch.setattr(choice_module, "CHUNK_BYTES", n_rows * V * 4 + 3)
    choice, sizes = make_choice(), list[int]()
    draw_rows = choice.sampler
    choice.sampler = lambda output, *args, **others: (
        sizes.append(len(output.next_token_logits)) or draw_rows(output, *args, **others)
    )
    kept_BNV = logits_BNV.clone()
    got_BN = chosen(choice, batch_of(info, return_logprob=keep_logits), kept_BNV, [5, 9, 2])
    assert torch.equal(got_BN, want_BN)
    assert max(sizes) == n_rows
    assert sum(sizes) == 3 * N
    assert torch.equal(kept_BNV, logits_BNV) == keep_logits


def test_requests_with_sampling_masks_are_one_chunk(monkeypatch):
    """SGLang's masks name rows of the whole batch."""
    monkeypatch.setattr(choice_module, "CHUNK_BYTES", 1)
    info = info_of([{}, {}], sampling_mask_batch_indices=torch.tensor([1]))
    choice, sizes = make_choice(), list[int]()
    choice.sampler = lambda output, info, **others: (
        sizes.append(len(output.next_token_logits)) or torch.zeros(len(output.next_token_logits), dtype=torch.int64)
    )
    chosen(choice, batch_of(info), torch.zeros(2, N, V), [0, 0])
    assert sizes == [2 * N]


def test_sampled_and_greedy_requests_share_a_batch():
    """The sampled request's tokens equal draws with its seed at the position of each slot."""
    torch.manual_seed(0)
    greedy, sampled = {"top_k": 1}, {"temperature": 5.0, "seed": 7}
    logits_BNV = torch.randn(2, N, V)
    target_BN = chosen(make_choice(), batch_of(info_of([greedy, sampled])), logits_BNV.clone(), [20, 30])
    likeliest_BN = logits_BNV.argmax(-1)
    assert torch.equal(target_BN[0], likeliest_BN[0])
    # The greedy request sets top_k, so SGLang applies top_k in the mixed batch. The lone request must set it as well.
    alone = info_of([sampled | {"top_k": V}])
    drawn = [draw(logits_BNV[1, i][None], alone, torch.tensor([30 + i]))[0] for i in range(N)]
    assert target_BN[1].tolist() == drawn
    assert drawn != likeliest_BN[1].tolist()


def test_min_p_holds_for_every_slot_of_its_request():
    """SGLang applies min_p only in draws without seeds. min_p = 1.0 keeps only the most likely token."""
    logits_TV = torch.randn(3 * N, V)
    info = over_slots(info_of([{}, {"min_p": 1.0}, {"min_p": 0.01}]), N)
    info.sampling_seed = None
    drawn_TN = torch.tensor([draw(logits_TV, info, torch.arange(3 * N)) for _ in range(20)]).view(20, 3, N)
    likeliest_N = logits_TV.argmax(-1).view(3, N)[1]
    assert (drawn_TN[:, 1] == likeliest_N).all()
    assert not (drawn_TN[:, 0] == drawn_TN[0, 0]).all()
    assert not (drawn_TN[:, 2] == drawn_TN[0, 2]).all()


def entries(*pairs: tuple[CustomLogitProcessor, list[int]]) -> dict[int, ProcessorEntry]:
    return {i: ProcessorEntry(processor, rows, torch.tensor(rows)) for i, (processor, rows) in enumerate(pairs)}


def with_processor(processor: CustomLogitProcessor, row: dict[str, Any], params: Any = None, **fields) -> Any:
    """Return the sampling info of one request with `processor`."""
    of_it = {"custom_params": [params], "custom_logit_processor": entries((processor, [0]))}
    return info_of([row], has_custom_logit_processor=True, **of_it, **fields)


GREEDY, SAMPLED = {"top_k": 1}, {"temperature": 5.0}
BOTH = pytest.mark.parametrize("row", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
NGRAM = {"ngram_size": 2, "window_size": 100}
PROMPTS = [[1, 2, 3], [4], [5, 5], [6, 9]]
TEXTS = [[7, 8, 7], [1], [2, 2], [9, 6, 9, 8]]  # output tokens of each request


@pytest.mark.parametrize("late", [[[]] * 3, [[7, 8], [1], [1, 2, 3]]], ids=["seen", "late"])
def test_a_processor_reads_the_tokens_before_its_slot(late):
    """The processor bans repeated bigrams, so the banned tokens show which tokens it read before the slot.

    `late`: committed tokens that the host has not received. The fourth request joins after the previous step. SGLang
    appends it to the request list of the previous step's batch.
    """
    torch.manual_seed(0)
    reqs = [request(prompt) for prompt in PROMPTS]
    for req, text in zip(reqs, TEXTS, strict=True):
        req.output_ids.extend(text)
    ngrams, others = DeepseekOCRNoRepeatNGramLogitProcessor(), DisallowedTokensLogitsProcessor()
    batch = batch_of(
        info_of(
            [{}] * 4,
            has_custom_logit_processor=True,
            custom_params=[NGRAM | {"__req__": reqs[0]}, {"token_ids": [5, 6]}, None, NGRAM | {"__req__": reqs[3]}],
            custom_logit_processor=entries((ngrams, [0, 3]), (others, [1])),
        ),
        *reqs[:3],
    )
    processors, n_late_B = Processors(), torch.tensor([*map(len, late)])
    processors.keep_tokens(batch, torch.tensor([[*new, 0, 0, 0][:3] for new in late]), n_late_B)
    batch.reqs.append(reqs[3])
    lens = torch.tensor([len(prompt) + len(text) for prompt, text in zip(PROMPTS, TEXTS, strict=True)])
    plan = SimpleNamespace(width=N, prefix_len_B=lens - 1 + torch.cat([n_late_B, torch.tensor([0])]))
    tokens_BN, logits_BNV = torch.randint(0, 4, (4, N)) + 6, torch.zeros(4, N, V)
    processors.apply(batch, plan, tokens_BN, logits_BNV.view(4 * N, V))
    for b, slot in product((0, 3), range(N)):
        text = [*PROMPTS[b], *TEXTS[b], *[*late, []][b], *tokens_BN[b, 1 : slot + 1].tolist()]
        banned = {after for before, after in pairwise(text) if before == text[-1]}
        assert set(logits_BNV[b, slot].isinf().nonzero().flatten().tolist()) == banned
    assert set(logits_BNV[1].isinf().nonzero()[:, 1].tolist()) == {5, 6}
    assert not logits_BNV[2].any()
    assert [req.output_ids.tolist() for req in reqs] == TEXTS


def test_a_request_without_a_processor_may_join_a_step_behind():
    """Its first token is not kept, because its own batch had no processor, and the host has not received it."""
    torch.manual_seed(0)
    reads, plain = request(PROMPTS[0]), request(PROMPTS[1])
    reads.output_ids.extend(TEXTS[0])
    params = [NGRAM | {"__req__": reads}, None]
    info = info_of(
        [{}] * 2,
        has_custom_logit_processor=True,
        custom_params=params,
        custom_logit_processor=entries((DeepseekOCRNoRepeatNGramLogitProcessor(), [0])),
    )
    lens = torch.tensor([len(PROMPTS[0]) + len(TEXTS[0]) - 1, len(PROMPTS[1])])
    tokens_BN, logits_BNV = torch.randint(0, 4, (2, N)) + 6, torch.zeros(2, N, V)
    plan = SimpleNamespace(width=N, prefix_len_B=lens)
    Processors().apply(batch_of(info, reads, plain), plan, tokens_BN, logits_BNV.view(2 * N, V))
    assert logits_BNV[0].isinf().any()
    assert not logits_BNV[1].any()


def test_texts_are_fetched_only_for_processors_that_read_them(monkeypatch):
    monkeypatch.setattr(Processors, "_texts", lambda *args: pytest.fail("the host waited"))
    info = with_processor(DisallowedTokensLogitsProcessor(), {}, {"token_ids": [5], "__req__": request([1])})
    batch = SimpleNamespace(reqs=[request([1])], sampling_info=info)
    logits_TV = torch.zeros(N, V)
    Processors().apply(batch, SimpleNamespace(width=N), torch.zeros(1, N), logits_TV)
    assert logits_TV[:, 5].isinf().all()


class Kinds(Whole):
    """Logits that record whether the argmax (`likeliest`) or whole logits were requested."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def likeliest(self, logits_TV: torch.Tensor) -> torch.Tensor:
        self.asked.append("likeliest")
        return super().likeliest(logits_TV)

    def whole(self, logits_TV: torch.Tensor) -> torch.Tensor:
        self.asked.append("whole")
        return super().whole(logits_TV)


NEEDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"rows": [GREEDY, {"seed": 1}]},
    "bias": {"logit_bias": torch.zeros(2, V)},
    "processor": {"has_custom_logit_processor": True, "custom_logit_processor": {}, "custom_params": [None] * 2},
    "penalty": {"sampling": {"presence_penalty": 0.5}},
    "logprobs": {"return_logprob": True},
    "grammar": {"grammar_tree": "drafts"},
}


@pytest.mark.parametrize("need", NEEDS)
def test_logits_are_gathered_whole_only_for_requests_that_need_them(need, monkeypatch):
    """A greedy step does not gather logits, calls no sampler and leaves the output without logits."""
    monkeypatch.setattr(choice_module, "allowed", lambda *_: None)
    kinds, fields = Kinds(), dict(NEEDS[need])
    rows, sampling = fields.pop("rows", [GREEDY] * 2), fields.pop("sampling", {})
    tree, logprob = fields.pop("grammar_tree", None), fields.pop("return_logprob", False)
    choice, logits_BNV = make_choice(logits=kinds), torch.randn(2, N, V)
    batch = batch_of(info_of(rows, **fields), request([1]), request([2], **sampling), return_logprob=logprob)
    choice.begin(batch)
    choice.anchors(batch, torch.tensor([5, 6]))
    if need == "greedy":
        choice.sampler = lambda *args, **kwargs: pytest.fail("sampled")
    target_BN = chosen(choice, batch, logits_BNV.clone(), [0, 0], grammar_tree=tree)
    assert kinds.asked == (["likeliest"] if need == "greedy" else ["whole"])
    assert (batch.output.next_token_logits is None) == (need == "greedy")
    assert need != "greedy" or torch.equal(target_BN, logits_BNV.argmax(-1))


class Scales(CustomLogitProcessor):
    def __call__(self, logits_TV: torch.Tensor, params: Any = None) -> torch.Tensor:
        return logits_TV * -10


def test_logits_are_edited_in_sglangs_order(monkeypatch):
    """Every slot gets penalties, grammar, bias and processor in this order.

    A logit of 4 becomes ((4 / 2 + 7) + 1) * -10 for token 5, the anchor. For other tokens it becomes
    ((4 + 7) + 1) * -10.
    """
    grammar = SimpleNamespace(apply=lambda logits_TV: logits_TV.add_(7))
    monkeypatch.setattr(choice_module, "allowed", lambda *_: grammar)
    req, choice = request([1, 2], repetition_penalty=2.0), make_choice()
    batch = batch_of(with_processor(Scales(), GREEDY, logit_bias=torch.ones(1, V)), req)
    choice.begin(batch)
    choice.anchors(batch, torch.tensor([5]))
    logits_1NV = torch.full((1, N, V), 4.0)
    chosen(choice, batch, logits_1NV, [2], torch.full((1, N), 5), grammar_tree="drafts")
    assert logits_1NV[0, :, 5].tolist() == [-100] * N
    assert logits_1NV[0, :, 6].tolist() == [-120] * N


@pytest.mark.parametrize("row", [{"top_k": 1}, {"temperature": 0.01}], ids=["greedy", "sampled"])
def test_a_processor_is_applied_once(row):
    """The processor reverses the order of the logits. Applied twice, it would restore their order.

    At temperature 0.01 the sampler takes the most likely token.
    """
    logits_1NV = torch.randperm(V).float().expand(1, N, V).contiguous()
    target_1N = chosen(make_choice(), batch_of(with_processor(Scales(), row), request([1])), logits_1NV.clone(), [1])
    assert torch.equal(target_1N, logits_1NV.argmin(-1))


class Reads(CustomLogitProcessor):
    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def __call__(self, logits_TV: torch.Tensor, params: Any = None) -> torch.Tensor:
        self.texts = [list(each["__req__"].output_ids) for each in params]
        return logits_TV


def test_processors_and_penalties_see_tokens_the_scheduler_lacks():
    """The scheduler's `output_ids` lack the anchor in the first step, and the first step's tokens in the second."""
    req, choice, processor = request([1, 2, 3], frequency_penalty=1.0), make_choice(), Reads()
    batch = batch_of(with_processor(processor, GREEDY, {"__req__": req}), req)
    choice.begin(batch)
    choice.anchors(batch, torch.tensor([7]))
    target_1N, drafts_1N = torch.tensor([[8, 4, 6, 6]]), torch.tensor([[7, 8, 9, 9]])
    chosen(choice, batch, torch.zeros(1, N, V), [3], drafts_1N)
    assert processor.texts == [[7], [7, 8], [7, 8, 9], [7, 8, 9, 9]]

    choice.count_tokens(batch, accept_ref(drafts_1N, target_1N, torch.tensor([3])))  # commits 8 and the bonus 4
    req.output_ids.append(7)
    logits_1NV = torch.zeros(1, N, V)
    chosen(choice, batch, logits_1NV, [5], torch.tensor([[4, 4, 9, 9]]))
    assert processor.texts == [[7, 8, 4], [7, 8, 4, 4], [7, 8, 4, 4, 9], [7, 8, 4, 4, 9, 9]]
    assert logits_1NV[0, 0, [7, 8, 4, 9, 6]].tolist() == [-1, -1, -1, 0, 0]
    assert logits_1NV[0, 3, [7, 8, 4, 9, 6]].tolist() == [-1, -1, -2, -2, 0]


@BOTH
def test_sampling_leaves_logits_unchanged_for_log_probabilities(row):
    """Log-probabilities need the logits, but SGLang's sampler overwrites its input with probabilities."""
    logits_1NV = torch.randn(1, N, V)
    before_1NV = logits_1NV.clone()
    chosen(make_choice(), batch_of(info_of([row]), return_logprob=True), logits_1NV, [3])
    assert torch.equal(logits_1NV, before_1NV)


@BOTH
def test_ranks_use_the_tokens_drawn_by_the_first_rank(row):
    """The rank under test is not the first, and would draw other tokens."""
    first = SimpleNamespace(world_size=2, rank_in_group=1, broadcast=lambda tokens, src: tokens.fill_(40 + src))
    choice, batch = make_choice(first), batch_of(info_of([row]), request([1]))
    choice.begin(batch)
    assert choice.anchors(batch, torch.tensor([5])).tolist() == [40]
    assert chosen(choice, batch, torch.zeros(1, N, V), [1]).tolist() == [[40] * N]


@BOTH
def test_tokens_from_an_exchange_are_not_broadcast(row):
    """After an exchange of the ranks' largest logits all ranks have the same tokens. Sampled tokens are broadcast."""
    broadcast = list[int]()
    second = SimpleNamespace(world_size=2, rank_in_group=1, broadcast=lambda tokens, src: broadcast.append(src))
    logits = Kinds()
    logits.agreed = True
    choice, batch = make_choice(second, logits), batch_of(info_of([row]), request([1]))
    chosen(choice, batch, torch.zeros(1, N, V), [1])
    assert broadcast == ([] if batch.sampling_info.is_all_greedy else [0])

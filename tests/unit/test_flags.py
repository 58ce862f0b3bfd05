"""Environment flags: accepted and refused values, and the table in docs/environment.md."""

from pathlib import Path

import pytest

from sglang_dflash import flags
from sglang_dflash.flags import Copy, Flags, GdnState, Rehearse, Simulated, WidthPolicy, Worker

PAGE = Path(flags.__file__).with_name("docs") / "environment.md"


def test_defaults_are_the_plugin_and_the_overlap_schedule() -> None:
    assert flags.read({}) == Flags(
        worker=Worker.PLUGIN,
        gdn_state=GdnState.FOLD,
        width_policy=WidthPolicy.AUTO,
        widths=(),
        width_trace=None,
        copy=Copy.AUTO,
        fp8_head=False,
        returns_features=False,
        rehearse=Rehearse(),
        probe=False,
        overlap=True,
        simulated=None,
    )


@pytest.mark.parametrize(
    ("value", "rehearse"),
    [
        ("off", Rehearse()),
        ("1", Rehearse("sm90")),
        ("SM100", Rehearse("sm100")),
        ("sm90,kernels", Rehearse("sm90", kernels=True)),
        ("1,streams", Rehearse("sm90", streams=True)),
        ("sm100,kernels,streams", Rehearse("sm100", kernels=True, streams=True)),
    ],
)
def test_rehearse(value: str, rehearse: Rehearse) -> None:
    assert flags.read({"SGLANG_DFLASH_REHEARSE": value}).rehearse == rehearse


@pytest.mark.parametrize("value", ["stock", "Stock"])
def test_stock(value: str) -> None:
    assert flags.read({"SGLANG_DFLASH_WORKER": value}).worker is Worker.STOCK


@pytest.mark.parametrize("name", ["SGLANG_ENABLE_SPEC_V2", "SGLANG_ENABLE_DFLASH_SPEC_V2"])
@pytest.mark.parametrize(("value", "overlap"), [("1", True), ("yes", True), ("0", False), ("False", False)])
def test_old_overlap_switches(name: str, value: str, overlap: bool) -> None:
    assert flags.read({name: value}).overlap is overlap


@pytest.mark.parametrize("flag", flags.FLAGS, ids=lambda flag: flag.name)
def test_an_unknown_value_is_refused_by_name(flag: flags.Flag) -> None:
    further = f" or an? .* such as {flag.example}" if flag.example else ""
    with pytest.raises(ValueError, match=f"{flag.name}='maybe' is not one of {', '.join(flag.values)}{further}; set"):
        flags.read({flag.name: "maybe"})


def test_width_lists_are_sorted_without_duplicates() -> None:
    found = flags.read({"SGLANG_DFLASH_WIDTHS": "16,4,1,4"})
    assert (found.width_policy, found.widths) == (WidthPolicy.AUTO, (1, 4, 16))
    assert flags.read({"SGLANG_DFLASH_WIDTHS": "Fixed"}).width_policy is WidthPolicy.FIXED


@pytest.mark.parametrize("value", ["4,", "4;8", "-1", "4.5", ""])
def test_malformed_width_lists_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="is not one of auto, fixed, random or a list of widths such as 1,4,8,16; set"):
        flags.read({"SGLANG_DFLASH_WIDTHS": value})


@pytest.mark.parametrize(
    ("value", "simulated"),
    [("-1", None), ("0", None), *((text, Simulated(5.5, "match-expected", "fixed")) for text in ("5.5", "+5.5e0"))],
)
def test_a_positive_number_simulates_acceptance(value: str, simulated: Simulated | None) -> None:
    assert flags.read({"SGLANG_SIMULATE_ACC_LEN": value}).simulated == simulated
    more = {"SGLANG_SIMULATE_ACC_METHOD": "multinomial", "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}
    wanted = simulated and Simulated(5.5, "multinomial", "real-draft-token")
    assert flags.read({"SGLANG_SIMULATE_ACC_LEN": value} | more).simulated == wanted


def test_a_directory_keeps_its_capitals() -> None:
    assert flags.read({"SGLANG_DFLASH_WIDTH_TRACE": "/A/Path"}).width_trace == Path("/A/Path")


@pytest.mark.parametrize("path", ["file", "file/deeper"])
def test_a_trace_that_cannot_be_written_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = (
        rf"^SGLANG_DFLASH_WIDTH_TRACE={tmp_path / path} cannot be written \({tmp_path / 'file'} is no directory that"
    )
    with pytest.raises(ValueError, match=error):
        flags.require_trace_folder(flags.read({"SGLANG_DFLASH_WIDTH_TRACE": str(tmp_path / path)}))
    flags.require_trace_folder(flags.read({"SGLANG_DFLASH_WIDTH_TRACE": str(tmp_path / "new" / "folder")}))
    flags.require_trace_folder(flags.read({}))
    assert not (tmp_path / "new").exists()


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"SGLANG_DFLASH_FOO is not a variable of sglang-dflash; use one of .* or unset it"
    ):
        flags.read({"SGLANG_DFLASH_FOO": "stock", "PATH": "/bin"})


@pytest.mark.parametrize(
    ("written", "meant"),
    [("WROKER", "WORKER"), ("WIDTH", "WIDTHS"), ("TRACE", "WIDTH_TRACE"), ("GDNSTATE", "GDN_STATE")],
)
def test_a_misspelt_name_gets_the_nearest_one(written: str, meant: str) -> None:
    error = f"^SGLANG_DFLASH_{written} is not a variable of sglang-dflash; did you mean SGLANG_DFLASH_{meant}\\?$"
    with pytest.raises(ValueError, match=error):
        flags.read({f"SGLANG_DFLASH_{written}": "1"})


def test_flags_of_the_stock_worker_are_refused_with_the_plugin() -> None:
    environ = {"SGLANG_DFLASH_EAGER_DRAFT_SAMPLER": "1"}
    with pytest.raises(ValueError, match="set SGLANG_DFLASH_WORKER=stock"):
        flags.read(environ)
    assert flags.read(environ | {"SGLANG_DFLASH_WORKER": "stock"}).worker is Worker.STOCK


def test_streams_of_the_stock_worker_are_not_rehearsed() -> None:
    with pytest.raises(ValueError, match="leave out `,streams`"):
        flags.read({"SGLANG_DFLASH_REHEARSE": "sm90,streams", "SGLANG_DFLASH_WORKER": "stock"})


def test_the_page_has_the_table() -> None:
    assert flags.table() in PAGE.read_text(), "run `python -m tests.tools.tables.write`"

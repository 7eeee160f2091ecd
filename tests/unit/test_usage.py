"""The report of how the ranks spent their time, made from what each rank says."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from pathlib import Path

import pytest

from dualdist.cli import main
from dualdist.core.agreement.call import Call, Record
from dualdist.core.collectives.join import BARRIER
from dualdist.observation.report import KINDS, Report, combined, lines
from dualdist.observation.usage import Usage

from ..helpers.requirements import need_modules


def row(rank: int, computing: float, data_loading: float, waiting: float, communication: float) -> Report:
    shares = (computing, data_loading, waiting, communication)
    head = {"rank": rank, "size": 2, "start": 1e9 + rank, "seconds": 10.0}
    return head | {"calls": 5, "bytes_reduced": 2_500_000} | dict(zip(KINDS, shares, strict=True))


def record(called: int, agreed: int, ended: int) -> Record:
    return Record(Call(BARRIER), called, agreed=agreed, ended=ended)


@pytest.mark.parametrize(
    ("found", "since", "waiting", "data"),
    [
        (record(100, 130, 137), 0, 30, 7),
        (record(100, 130, 137), 120, 10, 7),  # of an asynchronous call, from when the script waits
        (record(100, 130, 137), 133, 0, 4),
        (record(100, 0, 150), 0, 50, 0),  # of `join`, which has no agreement of its own
    ],
)
def test_a_wait_is_that_for_the_agreement_and_then_for_the_data(
    found: Record, since: int, waiting: int, data: int
) -> None:
    usage = Usage()
    usage.waited(found, since)
    report = usage.total(0, 1)
    nanoseconds = report["seconds"] * 1e9
    assert report["waiting"] * nanoseconds == pytest.approx(waiting)
    assert report["communication"] * nanoseconds == pytest.approx(data)
    assert report["calls"] == 1


def test_waits_of_other_threads_than_the_main_one_do_not_count() -> None:
    usage = Usage()

    def wait() -> None:
        usage.waited(record(100, 130, 137), 0)
        usage.waited_for_data(0)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    report = usage.total(0, 1)
    assert (report["calls"], report["waiting"], report["communication"]) == (0, 0, 0)


FAST, SLOW = row(0, 0.4, 0.1, 0.1, 0.4), row(1, 0.5, 0.4, 0.0, 0.1)


def test_waits_for_data_are_communication_only_as_far_as_all_ranks_wait() -> None:
    found = combined([SLOW, FAST])
    assert [report["rank"] for report in found["ranks"]] == [0, 1]
    assert [report["communication"] for report in found["ranks"]] == [0.1, 0.1]
    assert found["ranks"][0]["waiting"] == pytest.approx(0.4)
    assert found["ranks"][1]["waiting"] == 0
    assert (found["slowest"], found["reason"]) == (1, "data_loading")
    assert found["share"] == pytest.approx(0.4)
    json.dumps(found)


def test_a_rank_is_slow_since_the_first_of_the_reports_in_a_row_that_name_it() -> None:
    found = combined([FAST, SLOW])
    assert found["since"] == FAST["start"]
    later = [{**row, "start": row["start"] + 10} for row in (FAST, SLOW)]
    assert combined(later, found)["since"] == FAST["start"]
    equal = combined([later[0], {**later[0], "rank": 1}], found)
    assert equal["since"] is None and combined(later, equal)["since"] == later[0]["start"]


@pytest.mark.parametrize(
    ("waits", "is_slow"),
    [
        ([4, 4, 4, 4, 4, 4], True),
        ([5, 3, 4, 5, 3, 4], True),
        ([24, 0, 0, 0, 0, 0], False),  # once
        ([9, -1, 8, -2, 9, 1], False),  # the other rank waits, too
        ([24], False),  # one part tells nothing of chance
    ],
)
def test_a_difference_that_chance_explains_names_nobody(waits: list[int], is_slow: bool) -> None:
    """Rank 0 waits for rank 1 so long in each part of the 10 s; where it is less than 0, rank 1 waits for it."""
    moments = [10 * part / len(waits) for part in range(len(waits) + 1)]
    fast = [*itertools.accumulate((max(0, wait) / 6 for wait in waits), initial=0.0)]
    slow = [*itertools.accumulate((max(0, -wait) / 6 for wait in waits), initial=0.0)]
    ranks = [{**row, "marks": [*zip(moments, marks, strict=True)]} for row, marks in ((FAST, fast), (SLOW, slow))]
    found = combined(ranks)
    assert found["slowest"] == (1 if is_slow else None)
    found["ranks"] = [{**row, "size": 2} for row in found["ranks"]]
    # The shares of FAST and SLOW say that they differ, so a report without a slow rank must not call them equal.
    sentence = (
        "No rank is named: the waits differ by 40 % of the time, which may be chance, as parts of it differ as much."
    )
    assert lines(found)[-1].startswith("The others wait 40 %" if is_slow else sentence)


def test_marks_of_long_runs_are_few_and_far_apart() -> None:
    usage = Usage()
    start = usage.values()[0]
    for step in range(10_000):
        usage.waited(record(start + step * 10**8, start + step * 10**8 + 10**7, start + step * 10**8 + 10**7), 0)
    marks = usage.take(0, 1)["marks"]
    pauses = [after - before for (before, _), (after, _) in itertools.pairwise(marks)]
    assert 20 < len(marks) <= 64 and max(pauses) < 4 * min(pauses[1:-1])
    for moment, waited in marks[1:]:
        assert waited == pytest.approx((moment - 0.01) / 10 + 0.01)
    assert len(usage.take(0, 1)["marks"]) == 1


def test_scalars_are_what_tensorboard_takes(tmp_path: Path) -> None:
    need_modules("tensorboard")
    from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalars("time", combined([FAST, SLOW])["scalars"], 3)
    (folder,) = tmp_path.glob("*rank_1_data_loading")
    written = event_accumulator.EventAccumulator(str(folder)).Reload()
    (event,) = written.Scalars("time")
    assert (event.step, event.value) == (3, pytest.approx(0.4))


@pytest.mark.parametrize(
    "ranks",
    [
        [FAST],
        [FAST, row(1, 0.44, 0.1, 0.06, 0.4)],
        [row(0, 0.9, 0, 0.1, 0), row(1, 0.9, 0, 0.1, 0), row(2, 0.9, 0, 0.1, 0)],
    ],
)
def test_no_rank_is_slow_where_all_wait_equally_long(ranks: list[Report]) -> None:
    found = combined(ranks)
    assert (found["slowest"], found["reason"], found["share"]) == (None, None, 0)
    found["ranks"] = [{**row, "size": len(ranks)} for row in found["ranks"]]
    sentence = "No rank is slow: the ranks wait for each other equally long, but for chance."
    assert (sentence in lines(found)) == (len(ranks) > 1)


def written(folder: Path, *reports: Report) -> str:
    """Write the files of these reports into a folder, and return it."""
    for report in reports:
        (folder / f"time-{report['rank']}.json").write_text(json.dumps(report))
    return str(folder)


def test_the_command_shows_files_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps(combined([FAST, SLOW])))
    texts = []
    for path in (written(tmp_path, FAST, SLOW), str(whole)):
        assert main(["report", path]) == 0
        texts.append(capsys.readouterr().out.splitlines())
    assert texts[0] == texts[1]
    since = time.strftime("%H:%M:%S", time.localtime(1e9))
    assert texts[0] == [
        "rank  seconds  calls  MB reduced  computing  data loading  waiting  communication",
        "   0     10.0      5         2.5     40.0 %        10.0 %   40.0 %         10.0 %",
        "   1     10.0      5         2.5     50.0 %        40.0 %    0.0 %         10.0 %",
        f"The others wait 40 % of the time (4.0 of 10.0 s) more than rank 1 since {since}: its data loading takes "
        "longer than theirs.",
    ]


@pytest.mark.parametrize("content", [None, "", "[]", "3", '{"ranks": []}', '{"rank": 0}', '{"ranks": [{"rank": "x"}]}'])
def test_a_file_that_is_no_report_is_one_line_and_code_2(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    assert main(["report", str(path)]) == 2
    assert "FILE must be what a rank or hvd.report() has written" in capsys.readouterr().err
    assert main(["report", str(tmp_path / ".")]) == 2


def test_the_picture_needs_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, picture = written(tmp_path, FAST), str(tmp_path / "a.png")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        assert main(["report", folder, "--plot", picture]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    assert main(["report", folder, "--plot", picture]) == 0
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert main(["report", folder, "--plot", f"{folder}/none/a.png"]) == 2


def test_files_of_several_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path, {**FAST, "size": 1}, SLOW)
    assert main(["report", folder]) == main(["report", *[f"{folder}/time-1.json"] * 2]) == 2
    assert capsys.readouterr().err.count("Remove the files of older runs") == 2


def test_no_rank_is_called_slow_while_files_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", written(tmp_path, {**FAST, "size": 4}, {**SLOW, "rank": 2, "size": 4})]) == 0
    assert capsys.readouterr().out.splitlines()[3:] == ["ranks [1, 3] have no file"]

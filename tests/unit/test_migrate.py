"""`dualdist migrate` changes what is certain, says what is not, and leaves everything else as it is."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dualdist.cli import main
from dualdist.migrate.command import _home

from ..helpers.world import ROOT
from .test_without_torch import HIDE_TORCH, run_python

DDP = """\
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
"""

Report = list[tuple[int, str, str]]


def migrated(folder: Path, text: str | bytes) -> bytes:
    """Write the changes to a file with this text, and return what it then is. A second run finds no change."""
    file = folder / "train.py"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    assert main(["migrate", "--write", str(file)]) in (0, 1)
    written = file.read_bytes()
    main(["migrate", "--write", str(file)])
    assert file.read_bytes() == written
    return written


Findings = Callable[..., Report]


@pytest.fixture
def findings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Findings:
    """Returns line, kind and text of what is said about files of one job, which have these texts."""

    def found(*texts: str) -> Report:
        files = [tmp_path / f"file{number}.py" for number in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
        capsys.readouterr()
        main(["migrate", *map(str, files)])
        assert [file.read_text() for file in files] == list(texts)
        said = re.findall(r"^\S+?\.py:(\d+): ([a-z ]+): (.*)$", capsys.readouterr().out, re.MULTILINE)
        return [(int(line), kind, text) for line, kind, text in said]

    return found


def patched(file: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> bytes:
    """Return what `patch` makes of a file with the diff that is printed, which leaves the file as it is."""
    before = file.read_bytes()
    assert main(["migrate", "--diff", str(file)]) == 1
    assert file.read_bytes() == before
    diff = capfdbinary.readouterr().out
    subprocess.run(["patch", "--binary", str(file)], input=diff, check=True, capture_output=True, timeout=60)
    assert main(["migrate", "--diff", str(file)]) == 0
    assert capfdbinary.readouterr().out == b""
    return file.read_bytes()


def refused(file: Path, reason: str, capsys: pytest.CaptureFixture[str], *others: Path) -> None:
    """Check that a file is refused in one line that has the reason, and that nothing else is said."""
    assert main(["migrate", "--write", *map(str, others), str(file)]) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1) and f"{file} is not: " in errors and reason in errors


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import horovod.torch as hvd  # all", "import dualdist as hvd  # all"),
        ("import  horovod.torch  as  h , os", "import  dualdist  as  h , os"),
        ("from horovod.torch import init", "from dualdist import init"),
        (
            "from horovod.torch import (  # two\n    init,\n\n    rank as r,)",
            "from dualdist import (  # two\n    init,\n\n    rank as r,)",
        ),
        ("from horovod import torch as hvd", "import dualdist as hvd"),
        ("from horovod.torch import mpi_ops", "import dualdist as mpi_ops"),
        ("from horovod.torch import elastic", "from dualdist import elastic"),
        ("from horovod.torch.elastic import run, TorchState", "from dualdist.elastic import run, TorchState"),
        ("import horovod.torch.elastic as e", "import dualdist.elastic as e"),
        ("from horovod.torch.sync_batch_norm import SyncBatchNorm", "from dualdist import SyncBatchNorm"),
        ("from horovod.data import BaseDataLoader", "from dualdist.compat.data import BaseDataLoader"),
        ("import horovod.torch\nhorovod.torch.init()", "import dualdist\ndualdist.init()"),
        ("import horovod\nhorovod.run(f)", "import dualdist\ndualdist.run(f)"),
        (
            "import horovod.torch.elastic\n@horovod.torch.elastic.run\ndef f(s): 0",
            "import dualdist.elastic\n@dualdist.elastic.run\ndef f(s): 0",
        ),
        ("import horovod.torch as h\nh.mpi_ops.rank( )", "import dualdist as h\nh.rank( )"),
        (
            "import horovod.torch as h\nh.elastic.sampler.ElasticSampler(d)",
            "import dualdist as h\nh.elastic.ElasticSampler(d)",
        ),
        ("def f():\n\tif 1:\n\t\timport horovod.torch as hvd", "def f():\n\tif 1:\n\t\timport dualdist as hvd"),
        (
            "try:\n  import horovod.torch as h\nexcept ImportError:\n  h = None\nh.mpi_ops.size",
            "try:\n  import dualdist as h\nexcept ImportError:\n  h = None\nh.size",
        ),
    ],
)
def test_every_form_of_import_becomes_that_of_dualdist(before: str, after: str, tmp_path: Path) -> None:
    assert migrated(tmp_path, before) == after.encode()


def test_the_new_imports_work() -> None:
    """No name is promised that dualdist does not have: every name of Horovod is tried in every form."""
    names = json.loads((ROOT / "tests/data/horovod_public_names.json").read_text())
    found = [(home, name) for module in names for name in names[module] if (home := _home(module, name))]
    assert len(found) > 150
    for home, name in found:
        getattr(importlib.import_module(home), name)


def test_names_in_f_strings_are_changed_or_said(tmp_path: Path, findings: Findings) -> None:
    text = 'import horovod.torch\nx = f"""\n  \u00e9 {horovod.torch.rank()}"""; y = f"{horovod.torch.size()}"\n'
    kinds = [kind for _, kind, said in findings(text) if "rank" in said or "size" in said]
    written = migrated(tmp_path, text).decode()
    for kind, name in zip(kinds, ("rank", "size"), strict=True):
        found = f"{{dualdist.{name}()}}" in written, f"{{horovod.torch.{name}()}}" in written
        assert found == (kind == "change", kind != "change")


def test_bytes_around_the_changes_stay(tmp_path: Path) -> None:
    lines = [
        b"\xef\xbb\xbf#!/usr/bin/env python\r\n",
        b"s = '\xc3\xa9\xf0\x9f\x98\x80'; import horovod.torch; t = 'h\xc3\xa9'; horovod.torch.init()\r\n",
        b"\x0cx = 1 \t\r\n",
        b"y = '''\r\n  horovod.torch\xe2\x80\xa8'''\r\n",
        b"\r\nif x:\r\n\thorovod.torch.rank()  # \xc3\xbc",
    ]
    after = b"".join(lines).replace(b"import horovod.torch;", b"import dualdist;")
    after = after.replace(b"horovod.torch.init", b"dualdist.init").replace(b"horovod.torch.rank", b"dualdist.rank")
    assert migrated(tmp_path, b"".join(lines)) == after


def test_the_encoding_and_the_mode_of_a_file_stay(tmp_path: Path) -> None:
    text = "# -*- coding: latin-1 -*-\nn = 'caf\xe9'; import horovod.torch as hvd\n".encode("latin-1")
    file = tmp_path / "train.py"
    file.write_bytes(b"")
    file.chmod(0o750)
    assert migrated(tmp_path, text) == text.replace(b"horovod.torch", b"dualdist")
    assert file.stat().st_mode & 0o777 == 0o750


def test_the_diff_is_one_that_patch_applies(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    script, notes = tmp_path / "train.py", tmp_path / "train.ipynb"
    text = "# coding: latin-1\r\nimport os\r\nn = '\xe9'\r\nimport horovod.torch as h".encode("latin-1")
    script.write_bytes(text)
    assert patched(script, capfdbinary) == text.replace(b"horovod.torch", b"dualdist")
    notes.write_bytes(notebook(CELLS, indent=1))
    assert patched(notes, capfdbinary) == notebook(CHANGED_CELLS, indent=1)


def test_the_exit_code_says_whether_something_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.py"
    for text, codes in {
        "import os\n": (0, 0, 0),
        "import dualdist as hvd\nhvd.init()\n": (0, 0, 0),
        "import horovod.torch as hvd\n": (1, 0, 0),
        "import horovod.tensorflow as hvd\n": (1, 1, 1),
        "": (0, 0, 0),
    }.items():
        file.write_text(text)
        found = tuple(main(["migrate", *option, str(file)]) for option in ([], ["--write"], []))
        assert found == codes, text
    assert "nothing to change" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"x = 1\ndef f(:\n", "line 2"),
        (b"x = '\xff'\n", "encoding"),
        (b"# coding: nothing\n", "nothing"),
        (b"x = 1\0", "null"),
        (b"print 'python 2'\n", "line 1"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line_and_nothing_is_written(
    data: bytes | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("import horovod.torch as hvd\n")
    if data is not None:
        bad.write_bytes(data)
    refused(bad, reason, capsys, good)
    assert good.read_text() == "import horovod.torch as hvd\n"


CELLS = {
    "# About `horovod.torch`\n\nimport horovod.torch": "markdown",
    "%%capture\n!pip install horovod \\\n  torch": "code",
    '%matplotlib inline\nimport horovod.torch as hvd  # \u00e9 "all"\nfor i in ():\n  !ls it\'s (\nhvd.init()': "code",
    "": "code",
    "%%bash\nhorovodrun -np 2 python train.py": "code",
    'hvd.init?\ntext = """\n!horovod\n%d"""\nhosts = !hostname\nhvd.mpi_ops.rank( )\n': "code",
    "%%time\nimport horovod.torch as hvd": "code",
}
"""Source of a cell -> its type."""
CHANGED_CELLS = {
    source.replace("import horovod.torch as", "import dualdist as").replace("mpi_ops.rank", "rank"): kind
    for source, kind in CELLS.items()
}


def notebook(cells: dict[str, str], lines: bool = True, **options: Any) -> bytes:
    """Return a file of Jupyter's, each source of which is a list of lines or one string."""
    code = {"outputs": [{"text": "import horovod.torch as hvd"}], "execution_count": 3}
    listed = [
        {"cell_type": kind, "metadata": {}, "source": source.splitlines(keepends=True) if lines else source}
        | (code if kind == "code" else {})
        for source, kind in cells.items()
    ]
    whole = {"cells": listed, "metadata": {"note": "import horovod.torch as hvd"}, "nbformat": 4}
    return json.dumps(whole, **options).encode()


@pytest.mark.parametrize(
    "options", [{"indent": 1, "ensure_ascii": False}, {"indent": "\t", "lines": False}, {}, {"separators": (",", ":")}]
)
def test_only_code_cells_of_a_notebook_are_changed(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.ipynb"
    file.write_bytes(notebook(CELLS, **options))
    assert main(["migrate", str(file)]) == 1
    found = re.findall(r"\.ipynb:(cell \d+:\d+): change", capsys.readouterr().out)
    assert found == ["cell 3:2", "cell 6:6", "cell 7:2"]
    assert main(["migrate", "--write", str(file)]) == 0
    assert file.read_bytes() == notebook(CHANGED_CELLS, **options)


def test_lines_of_a_notebook_that_are_not_read_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.ipynb"
    bash = "%%bash\n!pip install horovod\npython -c 'import horovod.torch'"
    file.write_bytes(notebook({"%time import horovod.torch as hvd\n!horovodrun": "code", bash: "code"}))
    before = file.read_bytes()
    assert main(["migrate", "--write", str(file)]) == 1
    found = re.findall(r"ipynb:(cell \d+:\d+): by hand: not read", capsys.readouterr().out)
    assert (found, file.read_bytes()) == (["cell 1:1", "cell 2:3"], before)


@pytest.mark.parametrize("lines", [True, False])
def test_lines_of_a_cell_are_added_and_removed(lines: bool, tmp_path: Path) -> None:
    first = '%%time\nimport os\nos.environ["MASTER_PORT"] = "1"'
    start = "import torch.distributed as dist\ndist.init_process_group(\n    'gloo',\n)\nprint()"
    file = tmp_path / "train.ipynb"
    file.write_bytes(notebook({f"{first}\n{start}": "code", start: "code"}, lines, indent=1))
    assert main(["migrate", "--write", str(file)]) == 0
    hvd = "import dualdist as hvd\n"
    new = "import torch.distributed as dist\nhvd.init(transport='gloo')\nprint()"
    expected = {f"%%time\nimport os\n{hvd}{new}": "code", new: "code"}
    assert file.read_bytes() == notebook(expected, lines, indent=1)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.ipynb", '{"cells": [{"cell_type": "code", "source": ["x = 1\\n", "y ="]}]}', "cell 1, line 2"),
        ("a.ipynb", "import horovod.torch as hvd", "Expecting value"),
        ("a.ipynb", '{"worksheets": []}', "no notebook of format 4"),
        ("a.ipynb", '["cells"]', "no notebook of format 4"),
        ("a.json", "{}", "neither in .py nor in .ipynb"),
        ("a.txt", "import horovod.torch as hvd", "neither in .py nor in .ipynb"),
        ("a", "import horovod.torch as hvd", "neither in .py nor in .ipynb"),
    ],
)
def test_what_is_no_script_and_no_notebook_is_refused(
    name: str, text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    file.write_text(text)
    refused(file, reason, capsys)
    assert file.read_text() == text


def test_a_script_without_an_ending_needs_a_first_line_for_the_shell(tmp_path: Path) -> None:
    file = tmp_path / "train"
    file.write_text("#!/usr/bin/env python\nimport horovod.torch as hvd\n")
    assert main(["migrate", "--write", str(file)]) == 0
    assert file.read_text() == "#!/usr/bin/env python\nimport dualdist as hvd\n"


def test_it_needs_no_torch_and_runs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("import horovod.torch.elastic as e\nfrom horovod.data import BaseDataLoader\nraise SystemExit(7)\n")
    ended = run_python(HIDE_TORCH, "migrate", "--write", str(file))
    assert ended.returncode == 0, ended.stderr
    assert "horovod" not in file.read_text()


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("import horovod.tensorflow as hvd", 1, "horovod.tensorflow"),
        ("import horovod.common.util as u", 1, "horovod.common.util"),
        ("from horovod.torch import *", 1, "replace * by those in use"),
        (
            "from horovod.torch.mpi_ops import rank, HorovodAllreduce",
            1,
            "has `from dualdist import rank`; no horovod.torch.mpi_ops.HorovodAllreduce",
        ),
        ("from horovod.torch.elastic import run, init", 1, "from dualdist import init"),
        ("import horovod.torch\ndef f(horovod): horovod.torch.init()", 1, "another meaning"),
        ("import horovod.torch as hvd\nhvd.check_extension()", 2, "hvd.check_extension"),
        ("import horovod\nhorovod.__version__", 2, "horovod.__version__"),
        ("import horovod.torch as hvd\no = hvd.DistributedOptimizer(x)\no._handles", 3, "_handles"),
        ("import horovod.torch as hvd\nhvd.Adasum\nhvd.nccl_built()", 3, "local_size()"),
        ("import importlib\nh = importlib.import_module('horovod.torch')", 2, "'horovod.torch'"),
        ("import os\nimport dualdist as hvd\nos.environ['HOROVOD_RANK']", 3, "hvd.rank()"),
        ("import os\nimport dualdist as hvd\nif 'OMPI_COMM_WORLD_SIZE' in os.environ: 0", 3, "hvd.size()"),
        ("import os\nimport dualdist as hvd\nos.getenv('LOCAL_RANK')\nhvd.init()", 3, "hvd.local_rank()"),
        (DDP.replace('"gloo"', '"gloo", init_method=url'), 4, "dualdist exec"),
        (DDP.replace('"gloo"', '"gloo", store=store'), 4, "dualdist exec"),
        (DDP.replace('"gloo"', "*given"), 4, "dualdist exec"),
        (DDP.replace('"gloo"', '\n  # why\n  "gloo"'), 4, "dualdist exec"),
        (DDP + "torch.multiprocessing.spawn(f, join=False)", 6, "hvd.spawn"),
        (DDP.replace("dist.init", "if dist.is_initialized() == 0: dist.init").replace('o"', 'o", rank=r'), 4, "exec"),
        (DDP.replace('"gloo"', "rank=r, world_size=2").replace("dist.i", "def f(): dist.i") + "m = f", 4, "exec"),
        ("import dualdist\nfrom apex.parallel import DistributedDataParallel as D\nD(m)", 3, "hvd.Distributed"),
        ("import dualdist\nparser.add_argument('--local_rank', default=-1)", 2, "use hvd.local_rank()"),
        ("import dualdist as hvd\n" + DDP.replace('"gloo"', "store=store"), 5, "dualdist exec"),
    ],
)
def test_what_is_not_certain_is_said_and_left(
    text: str, line: int, words: str, tmp_path: Path, findings: Findings
) -> None:
    found = findings(text)
    assert [said for at, kind, said in found if at == line and kind == "by hand" and words in said], found
    assert line not in [at for at, kind, _ in found if kind == "change"]
    assert "init_process_group" not in text or migrated(tmp_path, text) == text.encode()


def test_what_differs_from_horovod_is_said_with_its_line(findings: Findings) -> None:
    text = (
        "import horovod.torch as hvd\n"
        "hvd.broadcast_optimizer_state(sgd, 0)\n"
        "self.opt = hvd.DistributedOptimizer(sgd)\n"
        "self.opt.synchronize(); torch.cuda.synchronize(); hvd.synchronize(handle)\n"
        "with self.opt.skip_synchronize(): self.opt.step()\n"
        "train = hvd.elastic.run(train)\n"
        "norm = hvd.SyncBatchNorm(3)\n"
    )
    expected = [
        (1, "change", "dualdist"),
        (2, "differs", "gradients of zero"),
        (3, "differs", "returns the given optimizer"),
        (4, "not needed", "synchronize()"),
        (5, "not needed", "skip_synchronize()"),
        (6, "differs", "torchrun"),
        (7, "differs", "CUDA only"),
    ]
    for (line, kind, said), (at, what, words) in zip(sorted(findings(text)), expected, strict=True):
        assert (line, kind) == (at, what) and words in said


def test_names_of_other_packages_and_scopes_are_left(tmp_path: Path, findings: Findings) -> None:
    text = "import os\nRANKS = {'RANK': 0}\nclass horovod:\n    torch = os\n"
    text += "horovod.torch.getpid()\nfrom .horovod import torch\n"
    assert findings(text) == []
    assert migrated(tmp_path, text) == text.encode()


def test_ddp_is_replaced_where_every_init_process_group_is(tmp_path: Path, findings: Findings) -> None:
    assert migrated(tmp_path, DDP).decode() == (
        "import os\nimport dualdist as hvd\nimport torch\nimport torch.distributed as dist\n"
        'hvd.init(transport="gloo")\n'
        "model = hvd.DistributedDataParallel(torch.nn.Linear(1, 1))\n"
    )
    uncertain = "import torch.distributed\ntorch.distributed.init_process_group(store=store)\n"
    assert not [kind for _, kind, _ in findings(DDP, uncertain) if kind == "change"]
    user = "import torch\nmodel = torch.nn.parallel.DistributedDataParallel(model)\n"
    alone = "no file calls init_process_group(): give all files of the job"
    assert findings(user) == [(2, "by hand", alone)]
    assert "change" in [kind for line, kind, _ in findings(user, DDP) if line == 2]


@pytest.mark.parametrize(
    ("statement", "is_replaced"),
    [
        ("import psutil; psutil.Process().memory_info()", True),
        ("import numpy as np; np.random.SeedSequence(1).spawn(4)", True),
        ("import torch.multiprocessing as mp; mp.spawn(f, nprocs=2)", True),
        ("import torch.multiprocessing as mp; mp.spawn(f, nprocs=2, join=False)", False),
        ('import multiprocessing; multiprocessing.get_context("spawn").Process(target=f).start()', False),
        ("context.Process(target=f).start()", False),
    ],
)
def test_ddp_is_left_alone_where_the_files_start_processes(
    statement: str, is_replaced: bool, findings: Findings
) -> None:
    assert ("change" in [kind for _, kind, _ in findings(f"{DDP}{statement}\n")]) == is_replaced


def test_variables_that_name_rank_and_size_for_dualdist_are_not_removed(tmp_path: Path, findings: Findings) -> None:
    text = DDP.replace("dist.init", 'os.environ["SLURM_NTASKS"] = "1"\ndist.init')
    assert 'os.environ["SLURM_NTASKS"] = "1"' in migrated(tmp_path, text).decode()
    assert [line for line, kind, _ in findings(text) if kind == "by hand"] == [4]


def test_arguments_that_are_replaced_need_no_change_by_hand(findings: Findings) -> None:
    arguments = 'rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])'
    text = DDP.replace('"gloo")', f'"gloo", {arguments})')
    assert "by hand" not in [kind for _, kind, _ in findings(text)]


def test_the_import_is_added_below_what_must_be_first_and_by_another_name_where_hvd_is_taken(tmp_path: Path) -> None:
    text = '#!/usr/bin/python\n"""Why."""\nfrom __future__ import annotations\nhvd = 1\ndef f():\n'
    text += "  import torch.distributed as d\n  d.init_process_group()\n"
    expected = text.replace("hvd = 1", "import dualdist\nhvd = 1").replace("d.init_process_group()", "dualdist.init()")
    assert migrated(tmp_path, text) == expected.encode()


def test_setting_the_rendezvous_before_init_is_removed(tmp_path: Path) -> None:
    text = """\
import os
import torch.distributed as dist
def setup():
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ.setdefault("MASTER_PORT", "1")  # any
    os.environ["RANK"] = str(number)
    if number: os.environ["WORLD_SIZE"] = "2"
    print(os.environ["RANK"])
    dist.init_process_group()
    os.environ["LOCAL_RANK"]
setup()
"""
    expected = text.replace('    os.environ["MASTER_ADDR"] = "localhost"\n', "")
    expected = expected.replace('os.environ.setdefault("MASTER_PORT", "1")  # any', "# any")
    expected = expected.replace('    os.environ["RANK"] = str(number)\n', "")
    expected = expected.replace("dist.init_process_group()", "hvd.init()")
    expected = f"import dualdist as hvd\nhvd.init()\n{expected}"
    assert migrated(tmp_path, text) == expected.encode()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", ""),
        ('backend="nccl" if cuda else "gloo", init_method="env://"', 'transport="nccl" if cuda else "gloo"'),
        ("name, timeout=timedelta( 0, 9 )", "transport=name, timeout=timedelta( 0, 9 )"),
        ('"gloo", rank=rank, world_size=MPI.COMM_WORLD.Get_size(), init_method=url', 'transport="gloo"'),
        ("rank=int(os.environ['RANK']), world_size=int(os.getenv('SLURM_NTASKS', 1))", ""),
        ("backend=d.Backend.NCCL", 'transport="nccl"'),
        ("d.get_default_backend_for_device(device), device_id=device", ""),
        ("args.backend", ""),
    ],
)
def test_arguments_of_init_process_group_are_kept_or_known(arguments: str, expected: str, tmp_path: Path) -> None:
    head = "import os, torch.distributed as d\nfrom mpi4py import MPI\n"
    head += "comm = MPI.COMM_WORLD\nrank = comm.rank\nname = 'gloo'\n"
    text = f"{head}d.init_process_group({arguments})\n"
    assert migrated(tmp_path, text).decode().splitlines()[-1] == f"hvd.init({expected})"


def test_a_script_for_dualdist_exec_has_the_lines_marked_that_it_does_not_need(findings: Findings) -> None:
    text = DDP.replace('"gloo"', "store=store")
    text += "os.environ['SLURM_PROCID']\nos.environ['RANK']\nos.environ['MASTER_PORT'] = '1'\n"
    found = [(line, kind) for line, kind, _ in findings(text)]
    assert found == [(4, "by hand"), (6, "not needed"), (8, "not needed")]


STARTS = {
    "it starts the processes": (
        """\
import torch, torch.multiprocessing as mp, torch.distributed as dist
def main(gpu, gpus, args):
    args.rank = args.node * gpus + gpu
    dist.init_process_group("nccl", init_method=args.url, world_size=args.size, rank=args.rank)
if __name__ == "__main__":
    args.gpus = torch.cuda.device_count()
    args.size = args.gpus * args.nodes
    mp.spawn(main, nprocs=args.gpus, args=(args.gpus, args))
""",
        """\
import dualdist as hvd
if __name__ == "__main__":
    hvd.init()
import torch, torch.multiprocessing as mp, torch.distributed as dist
def main(gpu, gpus, args):
    args.rank = args.node * gpus + gpu
    hvd.init(rank=args.rank, world_size=args.size)
if __name__ == "__main__":
    args.gpus = hvd.local_size()
    args.size = args.gpus * args.nodes
    main(hvd.local_rank(), args.gpus, args)
""",
    ),
    "torch.distributed.launch gives it --local_rank": (
        """\
from torch import distributed as d
parser.add_argument("--local_rank", type=int, default=-1)
other.add_argument('--local-rank', type=int, required=True)
def main():
    d.init_process_group(args.backend, world_size=size, rank=args.local_rank, init_method=args.url)
if __name__ == "__main__": main()
""",
        """\
import dualdist as hvd
import os
if __name__ == "__main__":
    hvd.init()
from torch import distributed as d
parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", -1)))
other.add_argument('--local-rank', type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
def main():
    hvd.init(rank=args.local_rank, world_size=size)
if __name__ == "__main__": main()
""",
    ),
    "it reads variables in a function that is called before": (
        """\
import os, torch.distributed as dist
def device(): return int(os.environ["LOCAL_RANK"])
def main():
    if "SLURM_PROCID" in os.environ: rank = int(os.environ.get("SLURM_PROCID", 0))
    elif "RANK" in os.environ: rank = int(os.environ["RANK"])
    dist.init_process_group(timeout=timeout)
if __name__ == "__main__": main()
""",
        """\
import dualdist as hvd
if __name__ == "__main__":
    hvd.init()
import os, torch.distributed as dist
def device(): return int(os.environ["LOCAL_RANK"])
def main():
    if "SLURM_PROCID" in os.environ: rank = hvd.rank()
    elif "RANK" in os.environ: rank = int(os.environ["RANK"])
    hvd.init()
if __name__ == "__main__": main()
""",
    ),
    "torch's module is left of a change by hand": (
        "import dualdist as hvd\nfrom torch.nn.parallel import DistributedDataParallel as DDP\nhvd.init()\nDDP(m)\n",
        "import dualdist as hvd\nfrom torch.nn.parallel import DistributedDataParallel as DDP\nhvd.init()\n"
        "hvd.DistributedDataParallel(m)\n",
    ),
}


@pytest.mark.parametrize("why", STARTS)
def test_a_script_joins_first_where_it_needs_what_the_launcher_knows(why: str, tmp_path: Path) -> None:
    before, after = STARTS[why]
    assert migrated(tmp_path, before).decode() == after
    assert main(["migrate", str(tmp_path / "train.py")]) == 0


def test_the_first_call_is_in_the_file_that_is_started(tmp_path: Path) -> None:
    helper = "import os, torch.distributed as d\nRANK = int(os.environ['RANK'])\ndef join(): d.init_process_group()\n"
    (tmp_path / "helper.py").write_text(helper)
    train = tmp_path / "train.py"
    train.write_text("import helper\nif __name__ == '__main__':\n    helper.join()\n")
    assert main(["migrate", "--write", str(tmp_path / "helper.py")]) == 1
    assert (tmp_path / "helper.py").read_text() == helper
    assert main(["migrate", "--write", str(tmp_path / "helper.py"), str(train)]) == 0
    start = 'import dualdist as hvd\nif __name__ == "__main__":\n    hvd.init()\n'
    assert train.read_text() == f"{start}import helper\nif __name__ == '__main__':\n    helper.join()\n"
    assert "def join(): hvd.init()" in (tmp_path / "helper.py").read_text()

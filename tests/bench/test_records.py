"""Records: what is written is read back, what does not fit is refused, nothing is overwritten."""

import json

import pytest

from mhc.bench import machine, records

POINT = {
    "op": "first_pre", "impl": "mhc_fused", "T": 64, "H": 4096, "hc": 4, "dtype": "bf16", "timer": "cuda_graph",
    "l2": "warm", "round": 0, "order": 3, "calls_per_sample": 40, "bytes": 10, "flops": 20, "status": "ok",
    "reason": "", "error": 1e-7, "samples_us": [2.0, 2.1],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _commit(monkeypatch):
    monkeypatch.setenv("MHC_GIT_SHA", "0123456789abcdef")


def write(path, points, run=None):
    with records.Recorder(path, run or records.run_line("latency", seed=7)) as recorder:
        for point in points:
            recorder.point(**point)
    return path


def test_round_trip(tmp_path):
    record = records.load(write(tmp_path / "a.jsonl", [POINT, POINT | {"T": 1, "round": 1}]))
    assert record.complete
    assert record.run["seed"] == 7
    assert record.points["T"].tolist() == [64, 1]
    assert record.points.samples_us[0] == [2.0, 2.1]
    assert record.caption.startswith("recorded on ")
    assert record.caption.endswith(", 0123456")


def test_name_says_date_machine_subject_commit_and_is_never_taken_twice(tmp_path):
    run = records.run_line("latency", seed=0) | {"gpu": "NVIDIA H200", "started": "2026-11-29T10:00:00+00:00"}
    first = records.free_path(tmp_path, run)
    assert first.name == "20261129-h200-latency-0123456.jsonl"
    write(first, [POINT], run)
    assert records.free_path(tmp_path, run).name == "20261129-h200-latency-0123456-2.jsonl"
    before = first.read_bytes()
    with pytest.raises(FileExistsError):
        records.Recorder(first, run)
    assert first.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"T": "64"}, "field T must be int"),
        ({"T": True}, "field T must be int"),
        ({"timer": "wall"}, "field timer must be one of"),
        ({"l2": "tepid"}, "field l2 must be one of"),
        ({"status": "fine"}, "field status must be one of"),
        ({"samples_us": []}, "samples_us is empty"),
        ({"samples_us": [-1.0]}, "positive"),
        ({"status": "failed"}, "needs a reason"),
    ],
)
def test_a_point_that_does_not_fit_is_refused_by_writer_and_loader(tmp_path, change, complaint):
    recorder = records.Recorder(tmp_path / "a.jsonl", records.run_line("latency", seed=0))
    with pytest.raises(ValueError, match=complaint):
        recorder.point(**POINT | change)
    recorder.close()
    path = write(tmp_path / "b.jsonl", [POINT])
    lines = path.read_text().splitlines()
    lines[1] = json.dumps({"record": "point"} | POINT | change)
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=f"line 2.*{complaint}"):
        records.load(path)


def test_a_missing_field_names_file_and_line(tmp_path):
    path = write(tmp_path / "a.jsonl", [POINT, POINT])
    lines = path.read_text().splitlines()
    lines[2] = lines[2].replace('"impl"', '"impel"')
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"a\.jsonl, line 3: field impl is missing"):
        records.load(path)


def test_new_records_hold_the_digest_of_the_kernels_and_old_ones_stay_readable(tmp_path):
    path = write(tmp_path / "a.jsonl", [POINT])
    run, *rest = path.read_text().splitlines()
    run = json.loads(run)
    assert run["kernels_sha256"] == machine.kernels_sha256()
    path.write_text("\n".join([json.dumps(run | {"kernels_sha256": 7}), *rest]))
    with pytest.raises(ValueError, match=r"line 1: field kernels_sha256 must be str, got 7"):
        records.load(path)
    del run["kernels_sha256"]
    path.write_text("\n".join([json.dumps(run), *rest]))
    assert records.load(path).complete
    with pytest.raises(ValueError, match="field kernels_sha256 is missing"):
        records.Recorder(tmp_path / "b.jsonl", run)


def test_the_digest_of_the_kernels_is_of_paths_and_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    kernels = tmp_path / "mhc" / "kernels"
    kernels.mkdir(parents=True)
    (tmp_path / "mhc" / "launch.py").write_text("a")
    (kernels / "one.py").write_text("b")
    digests = [machine.kernels_sha256()]
    (tmp_path / "mhc" / "ops.py").write_text("not part of a kernel's time")
    assert machine.kernels_sha256() == digests[0]
    (kernels / "one.py").write_text("c")
    digests.append(machine.kernels_sha256())
    (kernels / "one.py").rename(kernels / "two.py")
    digests.append(machine.kernels_sha256())
    (kernels / "new.py").touch()
    digests.append(machine.kernels_sha256())
    (tmp_path / "mhc" / "launch.py").write_text("ac")
    digests.append(machine.kernels_sha256())
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("text", ["", "{", '{"record": "point"}', "[]"])
def test_what_is_no_record_is_refused(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"a\.jsonl"):
        records.load(path)


def test_an_interrupted_run_is_readable_and_says_so(tmp_path):
    def interrupted():
        with records.Recorder(tmp_path / "a.jsonl", records.run_line("latency", seed=0)) as recorder:
            recorder.point(**POINT)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    record = records.load(tmp_path / "a.jsonl")
    assert not record.complete
    assert "interrupted" in record.caption
    assert len(record.points) == 1


def test_find_orders_records_of_one_subject_by_time(tmp_path):
    run = records.run_line("latency", seed=0)
    write(tmp_path / "z.jsonl", [POINT], run | {"started": "2026-01-01T00:00:00+00:00"})
    write(tmp_path / "a.jsonl", [POINT], run | {"started": "2026-02-01T00:00:00+00:00"})
    write(tmp_path / "b.jsonl", [], records.run_line("serving", seed=0))
    assert [p.name for p in records.find(tmp_path, "latency")] == ["z.jsonl", "a.jsonl"]


def test_other_subjects_bring_their_own_fields(tmp_path):
    run = records.run_line("acceptance", seed=0, model="mini")
    with records.Recorder(tmp_path / "a.jsonl", run, {"question": (int,)}) as recorder:
        recorder.point(question=3)
        with pytest.raises(ValueError, match="field question is missing"):
            recorder.point(status="ok")
    assert records.load(tmp_path / "a.jsonl", {"question": (int,)}).run["model"] == "mini"


def test_run_line_refuses_bad_names(tmp_path):
    with pytest.raises(ValueError, match="what must be"):
        records.run_line("Latency run", seed=0)
    with pytest.raises(ValueError, match="redefine gpu"):
        records.run_line("latency", seed=0, gpu="H20")


def test_commit_from_the_environment_and_its_absence(monkeypatch, tmp_path):
    monkeypatch.setenv("MHC_GIT_SHA", "abc1234-dirty")
    assert machine.git_state() == ("abc1234", True)
    monkeypatch.delenv("MHC_GIT_SHA")
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    with pytest.raises(RuntimeError, match="MHC_GIT_SHA"):
        machine.git_state()


def test_a_cpu_run_never_gets_a_gpu_caption():
    run = records.run_line("latency", seed=0) | {"gpu": None, "host_cpu": "Some CPU"}
    assert records.caption(run).startswith("recorded on CPU (Some CPU), ")

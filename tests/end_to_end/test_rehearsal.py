"""The script of `make rehearsal`, with tiny widths: every phase in a process of its own."""
import json, subprocess, sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2]/"benchmarks"/"rehearsal.py"
RESULT = SCRIPT.parent/"results"/"rehearsal.json"


def test_the_committed_result_is_of_full_size_and_keeps_to_the_plan():
    r = json.loads(RESULT.read_text())
    rows, compared = r["phases"], 0
    for row in rows.values():
        for measured, planned in ((row.get("memory", 0) - row.get("memory_before", 0), row.get("memory_plan")), (row.get("disk"), row.get("disk_plan"))):
            if planned: assert abs(measured / planned - 1) < 0.1; compared += 1
    assert not r["small"] and compared == 10 and rows["whole"]["lora"] > 9e7 and rows["table"]["disk"] > 2e9
    assert rows["whole"]["same_as_resumed"]["equal"] and rows["whole"]["same_as_resumed"]["tensors"] == 480
    assert all(rows[n]["disk_peak"] < 20e9 and rows[n]["left"] == 0 for n in ("encoder", "transformer"))


@pytest.mark.weekly
def test_the_whole_job_and_again(tmp_path):
    run = lambda *args: subprocess.run([sys.executable, SCRIPT, "--small", "--work", tmp_path/"work", "--out", tmp_path/"out.json", *args], text=True, capture_output=True, timeout=900)
    done = run()
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path/"out.json").read_text())["phases"]
    for name, files in dict(encoder=1, transformer=13).items(): assert (rows[name]["downloaded"], rows[name]["left"]) == (files, 0), "each file is deleted"
    assert rows["resume"]["resumed_from"] == "step_00000001" and len(rows["resume"]["step_seconds"]) == 1 and len(rows["whole"]["losses"]) == 2
    assert rows["whole"]["same_as_resumed"]["equal"] and rows["whole"]["same_as_resumed"]["largest_value"] > 0
    assert rows["sample"]["distinct_values"] > 20 and rows["table"]["timesteps"] == rows["transformer"]["timesteps"] >= 500
    assert run().stdout.count("done before") == len(rows), "an interrupted rehearsal continues"

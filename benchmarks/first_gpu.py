"""The first ten minutes on a GPU: ten parts, each in a process of its own with a time limit; one JSON file to send.

    make first-gpu                                    # all parts, about ten minutes on an 80 GB card
    python benchmarks/first_gpu.py --parts 1 2        # the two that retire most risks
    python benchmarks/first_gpu.py --device cpu       # the same code without a GPU, with tiny widths

`results/first_gpu.json` is written after every part, and what a part had found when its time was over stays.
A row with `wrong` or `failed` says what to look at; `refused` is a mode that this device cannot run.
results/gpu_h100.json has the rows of an H100; no other GPU has run it. On a CPU all parts run with tiny widths.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
OUT = HERE / "results" / "first_gpu.json"
LIBRARIES = (
    "torch",
    "torchvision",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "optimum-quanto",
    "torchao",
    "triton",
    "safetensors",
)

PARTS = { # {number: (module and function, seconds on a GPU, what it retires)}
    1: ("first_gpu_parts:facts", 60, "installation: driver, compilers, kernels, pinned memory"),
    2: ("first_gpu_tiny:tiny_runs", 400, "devices, dtypes and streams of sixteen modes, end to end"),
    3: ("first_gpu_parts:one_block", 120, "quantized layers, scaled float16, the decoder's memory"),
    4: ("first_gpu_parts:full_bf16", 200, "memory, time and compiling at full size, 1024"),
    5: ("first_gpu_parts:as_on_a_t4", 180, "a T4's path: nf4, scaled float16, 512, 15.6 GB"),
    6: ("first_gpu_parts:as_on_a_4090", 150, "a 4090's path: 8 bits and nf4, 1024, 24 GB"),
    7: ("first_gpu_parts:swapped", 120, "streams and pinned memory of swapped blocks"),
    8: ("first_gpu_parts:text_encoder", 150, "encoding at full size, one quantized shard"),
    9: ("first_gpu_parts:launched", 120, "DDP and FSDP as accelerate prepares them"),
    10: ("first_gpu_parts:stopping", 100, "Ctrl-C, SIGTERM and out-of-memory advice"),
}


def versions() -> dict: # {package: version or None}
    "What is installed."
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def parser() -> argparse.ArgumentParser:
    "The command line."
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    p.add_argument("--parts", type=int, nargs="+", default=list(PARTS), choices=list(PARTS))
    p.add_argument("--modes", nargs="+", help="of part 2, by name; default all")
    p.add_argument("--patience", type=float, default=1.0, help="factor on each part's time limit")
    p.add_argument("--out", type=Path, default=OUT)
    p.add_argument("--run", help=argparse.SUPPRESS) # the part that this process runs
    return p


def run_part(number: int, args, out: Path) -> dict:
    "Run a part in a process of its own; what it had noted counts also if it dies or its time is over."
    target, seconds, _ = PARTS[number]
    notes = out.with_suffix(f".part{number}.jsonl")
    notes.unlink(missing_ok=True)
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--run",
        target,
        "--device",
        args.device,
        "--out",
        str(notes),
    ]
    if args.modes:
        command += ["--modes", *args.modes]
    began = time.monotonic()
    log = out.with_suffix(f".part{number}.log")
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(seconds * args.patience)
            ended = "ended" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            ended = f"its {seconds * args.patience:.0f} s were over"
    rows = {}
    if notes.is_file():
        for line in notes.read_text().splitlines():
            row = json.loads(line)
            rows[row.pop("name")] = row
        notes.unlink()
    last = log.read_text(errors="replace").splitlines()[-15:]
    log.unlink()
    result = dict(ended=ended, seconds=round(time.monotonic() - began, 1), rows=rows)
    return result if ended == "ended" else result | dict(log=last)


def verdict(result: dict) -> str:
    "A part's result in a few words."
    rows = result["rows"]
    bad = [name for name, row in rows.items() if row.get("wrong") or row.get("failed")]
    text = f"{len(rows)} rows, {result['seconds']:.0f} s"
    if result["ended"] != "ended":
        text += f"; {result['ended']}"
    return f"{text}; wrong: {', '.join(bad)}" if bad else text


def main(argv=None) -> int: # 0 if nothing is wrong
    "Run the parts, and write the file after each."
    args = parser().parse_args(argv)
    if args.run:
        return child(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    found = dict(
        device=args.device,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=platform.platform(),
        versions=versions(),
        parts={},
    )
    for number in args.parts:
        print(f"part {number} of {len(PARTS)}: {PARTS[number][2]}", flush=True)
        result = run_part(number, args, args.out)
        found["parts"][str(number)] = dict(retires=PARTS[number][2]) | result
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"    {verdict(result)}", flush=True)
        for name, row in result["rows"].items():
            for what in filter(None, [row.get("failed"), *row.get("wrong", [])]):
                print(f"    {name}: {what}", flush=True)
    print(f"send {args.out}")
    bad = [
        r
        for r in found["parts"].values()
        if r["ended"] != "ended" or any(row.get("wrong") or row.get("failed") for row in r["rows"].values())
    ]
    return 1 if bad else 0


def child(args) -> int:
    "Run one part here; its rows are appended to a file as they are found."
    sys.path.insert(0, str(HERE))
    module, name = args.run.split(":")
    part = getattr(__import__(module), name)

    def note(name: str, **row):
        "Keep a row of the result."
        with open(args.out, "a") as file:
            file.write(json.dumps(dict(name=name) | row) + "\n")

    part(args.device, note, args.modes)
    return 0


if __name__ == "__main__":
    sys.exit(main())

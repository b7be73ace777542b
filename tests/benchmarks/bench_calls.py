"""Hostile calls of every command: no traceback, no success for what cannot be meant.

    python tests/benchmarks/bench_calls.py --count 1500 --out artifacts/bench-calls.json

Calls are generated from the command tree itself, so a new command or option is attacked without an
edit here: each is a call that works, with one or two of its values exchanged for something hostile
to that kind of value. A call is judged by its exit code (0, 1 or 2), its last line of error, what
``--json`` printed, and the files it left. Calls run in this process's children, which import JAX
once; a call that is still at work after ``--seconds`` is stopped like Ctrl-C and must then end
with 130; one that needs more than ``--gib``, or ends its process, has failed.
"""

import collections
import contextlib
import importlib
import io
import itertools
import json
import math
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
from harness import Bench

# command -> a call that works, quickly where it can; FILE, DATA and NEW stand for paths
GOOD = {
    "optimize": "--epochs 2 --iters 4 --eps 2 --delta 1e-3 --strategy identity --out NEW.npz",
    "certify": "FILE --eps 3 --delta 1e-2 --certify-samples 4096 --seed 1",
    "calibrate": "FILE --eps 3 --delta 1e-2 --certify-samples 4096 --seed 1 --out NEW.npz",
    "show": "FILE",
    "statement": "FILE",
    "plan": "--units 100 --eps 2 --epochs 2 --iters 4 --loader poisson --yes --out NEW.npz",
    "noise": "FILE --params 100 --repeats 1",
    "plot": "FILE --out NEW.png",
    "report": "FILE --out NEW.html",
    "verify": "TEXT",
    "compare": "--epochs 2 --iters 4 --eps 2 --include dpsgd+balls-in-bins --jobs 1 --cache CACHE",
    "account dpsgd": "--epochs 2 --iters 8 --eps 2 --delta 1e-5",
    "account banded": "--epochs 2 --iters 8 --bands 2 --eps 2 --delta 1e-5",
    "account balls-in-bins": "--epochs 2 --iters 4 --noise-multiplier 2 --delta 1e-5",
    "account els": "--epochs 2 --iters 8 --group-size 2 --noise-multiplier 2 --delta 1e-5",
    "account uls": "--iters 8 --batch-size 10 --population 100 --eps 2 --delta 1e-5",
    "account fixed-batch": "--iters 8 --batch-size 10 --population 100 --eps 2 --delta 1e-5",
    "account fedavg": "--iters 8 --probability 0.1 --noise-multiplier 2 --delta 1e-5",
    "data build": "NEW --data DATA --tokenizer MISSING",
    "train": "--epochs 2 --iters 4 --eps 2 --delta 1e-5 --show-config",
    "audit": "FILE --canaries 64 --seed 1",
}
NUMBERS = (
    *shlex.split(
        "0 -1 -0.0 nan inf -inf 1e309 1e-320 1e9 1e12 1e20 1e23 2147483648 9223372036854775808 0.5 "
        "1.5 1e-50 1e-100 0.99 1 2 1000 x 0x10 1_0 1__0 1,5 5:1 1:1e9 1: : 1:2:0 ½ ١ 1e -- +3 None "
        "True 10M 1e400M -M"
    ),
    *("", " ", "1e-5\n", "9" * 400),
)
WORDS = (
    *shlex.split(
        "x 🙂 [bold]x[/bold] -- -x ../.. a:b:c %s%n None balls-in-bins:bins=4 :,= pure:nan "
        "pure:1e9 balls-in-bins:bins=1e9,epochs=1e9 poisson:probability=2,iterations=-1 "
        "gaussian:-1 all approximate:1:2 banded-sqrt:0 banded-sqrt:99999999999 blt,,dpsgd"
    ),
    *("", " ", "a" * 5000, "\x1b[31mred"),
)
PATHS = (
    *shlex.split(
        ". .. / MISSING FOLDER TEXT CUT EMPTY /dev/null /dev/full LOCKED no/such/folder/x.npz "
        "TEXT/x.npz ~/x.npz x.npz.npz - -- 🙂.npz FILE x.png x"
    ),
    *("", " ", "a" * 300, "new\nline.npz"),
)
# what commands import when they are run
IMPORTED = (
    "mfopt.experiments.decision_plots",
    "mfopt.experiments.report",
    "mfopt.training.audit",
    "mfopt.training.data.build",
    "mfopt.training.execute",
    "mfopt.training.models.huggingface",
    "mfopt.training.verification",
)
# values at which a call can mean nothing: success is a failure of the command
NEVER = {
    *shlex.split("x nan inf -inf 0x10 1__0 1: : 1:2:0 5:1 1e None True -M 1e400M 1e309"),
    *("", " "),
}
NUMERIC = ("integer", "float", "integers", "numbers")
PLACES = shlex.split("FOLDER TEXT CUT EMPTY MISSING LOCKED CORPUS DATA CACHE FILE")

bench = Bench(
    __file__,
    __doc__,
    count=(1500, "Calls to generate."),
    seed=(0, "Pin the randomness."),
    seconds=(10.0, "Time before a call is stopped."),
    gib=(12.0, "Memory that a call may need: `noise` fills what is free."),
    only=("", "Only calls of commands that start with this."),
    worker=(False, "Make the calls that standard input holds."),
)


def options_of(path):
    """Main name -> click option of a command, without what help hides."""
    from mfopt_cli.main import cli

    command = cli
    for name in path.split():
        command = command.get_command(click.Context(command), name)
    return {
        param.opts[0]: param
        for param in command.get_params(click.Context(command))
        if isinstance(param, click.Option) and "--help" not in param.opts
    }


def hostile(param, rng):
    """A value to break this option with."""
    if isinstance(param.type, click.Path):
        return rng.choice(PATHS)
    if param.type.name in NUMERIC:
        return rng.choice(NUMBERS)
    return rng.choice(WORDS + PATHS)


def generate(count, seed):
    """``count`` calls, equally many of every command."""
    rng = random.Random(seed)
    reference = {path: options_of(path) for path in GOOD}
    for index in range(count):
        path = list(GOOD)[index % len(GOOD)]
        words = shlex.split(GOOD[path])
        for _ in range(rng.choice((1, 1, 1, 2))):
            words = _broken(words, reference[path], rng)
        if rng.random() < 0.3 and "--json" in reference[path] and "--json" not in words:
            words.append("--json")
        yield [*path.split(), *words]


def _broken(words, reference, rng):
    """``words`` with one thing wrong: a value, a word too many or too few, an option twice."""
    words = list(words)
    kind = rng.random()
    if kind < 0.75 and reference:
        name = rng.choice(list(reference))
        param = reference[name]
        if param.is_flag:
            return [*words, name]
        value = hostile(param, rng)
        if name in words:
            index = words.index(name) + 1
            words[index : index + 1] = [value]
            return words
        return [*words, name, value]
    if kind < 0.85 and words:
        words.pop(rng.randrange(len(words)))
        return words
    if kind < 0.95 and any(not word.startswith("-") for word in words):
        index = rng.choice([i for i, word in enumerate(words) if not word.startswith("-")])
        words[index] = rng.choice(PATHS)
        return words
    return [*words, rng.choice((*WORDS, "--no-such-option", "--eps", "-h", "--js"))]


def prepare(folder, strategy="sqrt"):
    """The paths that the capital words of a call stand for; ``strategy`` is that of FILE."""
    from mfopt_cli.main import main

    places = {name: str(folder / name.lower()) for name in PLACES}
    places["FILE"] += ".npz"
    (folder / "folder").mkdir()
    (folder / "corpus").mkdir()
    (folder / "corpus" / "metadata.json").write_text("1")
    (folder / "data").write_text('{"user": "a", "text": "b"}\n')
    (folder / "text").write_text("hello")
    (folder / "empty").write_text("")
    with contextlib.redirect_stdout(io.StringIO()):
        search_words = (
            f"optimize --epochs 2 --iters 4 --eps 2 --delta 1e-3 --strategy {strategy} --seed 1"
        )
        main(
            [*search_words.split(), "--certify-samples", "4096", "--quiet", "--out", places["FILE"]]
        )
    (folder / "cut").write_bytes(Path(places["FILE"]).read_bytes()[:700])
    (folder / "locked").write_text("")
    (folder / "locked").chmod(0)
    return places


class _OutOfTimeError(KeyboardInterrupt):
    """As Ctrl-C."""


def run(call, places, seconds):
    """Make one call in this process; how it ended, and what is wrong with that."""
    from mfopt_cli.main import main

    folder = Path(tempfile.mkdtemp(dir=places["FOLDER"]))
    words = [_placed(word, places, folder) for word in call]
    output, err, code, stopped = io.StringIO(), io.StringIO(), 0, False
    problem = ""

    def stop(*_):
        nonlocal stopped
        stopped = True
        raise _OutOfTimeError

    previous_folder, began = Path.cwd(), time.perf_counter()
    previous = signal.signal(signal.SIGALRM, stop)
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(err):
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                main(words)
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 0 if not ended.code else 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as escaped:
        problem = f"traceback: {type(escaped).__name__}: {str(escaped)[:300]}"
    finally:
        os.chdir(previous_folder)
        signal.signal(signal.SIGALRM, previous)
    problem = problem or judge(call, code, output.getvalue(), err.getvalue(), folder, stopped)
    return {
        "call": call,
        "code": code,
        "stopped": stopped,
        "problem": problem,
        "seconds": time.perf_counter() - began,
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "said": (err.getvalue().strip().splitlines() or [""])[-1][:1000],
    }


def _placed(word, places, folder):
    name, dot, remaining = word.partition(".") if word.startswith("NEW") else word.partition("/")
    if name == "NEW":
        return str(folder / f"new{dot}{remaining}")
    return places.get(name, name) + dot + remaining


def judge(call, code, output, err, folder, stopped):
    """What is wrong with how a call ended; an empty text where nothing is."""
    # an interrupt inside a garbage collector's callback is printed and dropped by Python itself
    if "Traceback" in output + err and not (stopped and "Exception ignored in" in err):
        return f"traceback printed: {(output + err)[-400:]}"
    if stopped:
        return "" if code in (0, 1, 2, 130) else f"exit code {code} for an interrupt"
    if code not in (0, 1, 2):
        return f"exit code {code}"
    lines = err.strip().splitlines()
    if code and not (lines and lines[-1].startswith(("mfopt: ", "Error: "))):
        return f"no reason given: {lines[-1:]}"
    if (
        code
        and "--json" in call
        and output.strip()
        and call[0] != "audit"
        and not _is_error(output)
    ):
        return "output in spite of an error"
    if any(part.name.endswith(".mfopt-part") for part in folder.rglob("*")):
        return "a part of a file was left"
    if code == 0:
        if "--json" in call and not {"-h", "--help", "--list", "--show-config"} & set(call):
            try:
                _finite(json.loads(output))
            except ValueError as problem:
                return f"not JSON: {problem}"
        return _meaningless(call)
    return ""


def _is_error(output):
    """True for the JSON object of an error, and nothing else."""
    try:
        return "error" in json.loads(output)
    except ValueError:
        return False


def _finite(value):
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number that is not finite")
    inside = value.values() if isinstance(value, dict) else value
    for item in inside if isinstance(value, dict | list) else ():
        _finite(item)


def _meaningless(call):
    path = " ".join(call[:2]) if " ".join(call[:2]) in GOOD else call[0]
    reference = options_of(path)
    if {"-h", "--help", "--list"} & set(call):
        return ""
    for name, value in itertools.pairwise(call):
        param = reference.get(name)
        numeric = param is not None and param.type.name in NUMERIC
        if numeric and value in NEVER and call.count(name) == 1:
            return f"success with {name} {value!r}"
    return ""


def worker(calls, options):
    """Make the calls, one line of JSON on the original standard output for each."""
    report = os.fdopen(os.dup(1), "w")
    for name in IMPORTED:  # a call that is stopped must not leave half a module to the next one
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        places = prepare(Path(folder))
        for index, call in calls:
            report.write(json.dumps({"begun": index}) + "\n")
            report.flush()
            report.write(json.dumps({"index": index, **run(call, places, options.seconds)}) + "\n")
            report.flush()


def drive(calls, options):
    """All calls, in a child that is replaced when a call ends it."""
    remainder, results = collections.deque(enumerate(calls)), []
    while remainder:
        child = subprocess.Popen(
            [sys.executable, __file__, "--worker", f"--seconds={options.seconds}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "MPLBACKEND": "Agg", "HOME": tempfile.gettempdir()},
        )
        json.dump(list(remainder), child.stdin)
        child.stdin.close()
        begun = None
        for line in child.stdout:
            if not line.startswith("{"):
                continue
            entry = json.loads(line)
            if "begun" in entry:
                begun = entry["begun"]
                continue
            while remainder and remainder[0][0] <= entry["index"]:
                remainder.popleft()
            if entry["gib"] > options.gib:
                entry["problem"] = entry["problem"] or f"{entry['gib']:.1f} GiB"
                # a fresh process, so that the next one's memory can be told
                child.kill()
            begun = None
            results.append(entry)
            if entry["problem"]:
                print(f"{shlex.join(entry['call'])[:200]}\n    {entry['problem']}", flush=True)
            if entry["gib"] > options.gib:
                break
        child.wait()
        if begun is not None:
            while remainder and remainder[0][0] <= begun:
                remainder.popleft()
            problem = f"the process ended with {child.returncode}"
            results.append({"call": calls[begun], "code": child.returncode, "problem": problem})
            print(f"{shlex.join(calls[begun])[:200]}\n    {problem}", flush=True)
        elif child.returncode > 0 and not results:
            raise SystemExit("the worker does not start")
    return results


@bench.work
def called(options):
    """Make the calls; exit code 1 where something was wrong with one."""
    if options.worker:
        worker([(index, call) for index, call in json.load(sys.stdin)], options)
        return None, False
    built = generate(options.count, options.seed)
    results = drive([call for call in built if " ".join(call).startswith(options.only)], options)
    wrong = [entry for entry in results if entry["problem"]]
    report = {
        "command": bench.how,
        "calls": len(results),
        "codes": dict(sorted(collections.Counter(str(entry["code"]) for entry in results).items())),
        "stopped_at_work": sum(entry.get("stopped", False) for entry in results),
        "largest_gib": round(max(entry.get("gib", 0.0) for entry in results), 2),
        "problems": [{key: entry[key] for key in ("call", "code", "problem")} for entry in wrong],
    }
    return report, bool(wrong)


if __name__ == "__main__":
    bench.main()

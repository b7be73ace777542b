"""What every benchmark has: options, a report that is printed, kept and gone on with, and timing.

    bench = Bench(__file__, __doc__, seeds=(20, "Certificates for each target."))

    @bench.work
    def measured(options): return report

    if __name__ == "__main__":
        bench.main()

The report is printed as JSON and written to ``--out``; work that returns (report, exit code) has
that code.
"""

import argparse
import json
import math
import os
import re
import shlex
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np
from mfopt_cli.options import whole

from mfopt._runtime import _files

sys.path.append(str(Path(__file__).parents[2] / "artifacts" / "papers"))  # of the manifest

Options = argparse.Namespace


def count(text):
    """A whole number, which may be written 1e6 or 10M."""
    try:
        return whole(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"{text!r} {problem}") from None


def listed(convert, choices=()):
    """A comma-separated list of what ``item`` reads, each of ``choices`` where there are any."""
    reference = list(choices)

    def parse(text):
        words = [word.strip() for word in text.split(",")]
        for word in words:
            if reference and word not in reference:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(reference)}")
        return [convert(word) for word in words]

    parse.__name__ = f"list of {getattr(convert, '__name__', 'values')}"
    return parse


def choice(reference, default=()):
    """An option that is a list of some of ``known``; all of them where there is no ``default``."""
    names = [*reference]
    return [*default] or names, f"Which of {', '.join(names)}; a list.", listed(str, names)


class Parser(argparse.ArgumentParser):
    """Reads a benchmark's options, and refuses what no benchmark can do."""

    def parse_args(self, *arguments, **keywords):
        """Parse; an ``--out`` that cannot be written and numbers not above 0 are refused."""
        actual = super().parse_args(*arguments, **keywords)
        for action in self._actions:
            value = getattr(actual, action.dest, None)
            if value == action.default or not action.option_strings:
                continue
            for entry in value if isinstance(value, list | tuple) else [value]:
                if entry is False or not isinstance(entry, int | float):
                    continue
                if not 0 < entry < math.inf:
                    self.error(f"{action.option_strings[0]} {entry}: must be finite and above 0")
        output = getattr(actual, "out", None)
        if output is not None and output.is_dir():
            self.error(f"--out {output}: is a folder; name a file")
        if output is not None and not output.resolve().parent.is_dir():
            self.error(f"--out {output}: its folder does not exist")
        return actual


class Bench:
    """One benchmark: its options, its work and its report.

    Args:
      file: its path; the name follows from it.
      doc: its module's docstring, shown by --help.
      options: name -> (default, help, what reads a word). Without the last the type follows from
        the default: whole numbers may be written 1e6, a list is one word with commas, False is a
        flag.
    """

    def __init__(self, file, doc, **options):
        self.script = Path(file).name
        self._doc, self._options = doc, options
        self._work = None

    def work(self, function):
        """Decorator of what does it all: from the options to a report."""
        self._work = function
        return function

    def parser(self):
        """Its options, --seed among them where it has one, and --out."""
        words = Parser(
            prog=f"python tests/benchmarks/{self.script}",
            description=self._doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for name, (default, text, *reader) in self._options.items():
            example = default[0] if isinstance(default, list) else default
            kind = {int: count}.get(type(example), type(example))
            kind = listed(kind) if default is not example else kind
            options = {"default": default, "type": next(iter(reader), kind)}
            if default is False:
                options = {"action": "store_true"}
            words.add_argument(f"--{name.replace('_', '-')}", help=text, **options)
        words.add_argument("--out", type=Path, help="JSON file to write, replacing what is there.")
        return words

    def main(self):
        """Do the work, print its report and keep it; ends with its exit code."""
        settings = sys.argv[1:]
        options = self.parser().parse_args(settings)
        # the words that run this once more, but for where its report goes
        pairs = zip(["", *settings], settings, strict=False)
        words = [
            w for original, w in pairs if original != "--out" and not re.match("--out(=|$)", w)
        ]
        self.how = shlex.join(["python", f"tests/benchmarks/{self.script}", *words])
        self.begun, self.out = time.perf_counter(), options.out
        self.seed = getattr(options, "seed", None)
        actual = self._work(options)
        report, code = actual if isinstance(actual, tuple) else (actual, 0)
        if report is not None:
            self.keep(report)
            print(json.dumps(report, indent=2, ensure_ascii=False))
        sys.exit(int(code))

    def keep(self, report):
        """Write what there is to --out and into the manifest of its folder, or of the one above."""
        if self.out is None:
            return
        import manifest

        from mfopt.experiments.runner import device

        _files.write(self.out, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        output = self.out.resolve()
        for folder in output.parents[:2]:
            if (folder / manifest.MANIFEST).is_file():
                name, beside = output.relative_to(folder), folder == output.parent
                manifest.note(
                    folder,
                    name.with_suffix("").as_posix(),
                    [output],
                    how=f"{self.how} --out artifacts/{name}" if beside else self.how,
                    seed=self.seed,
                    device=[device()],
                    seconds=time.perf_counter() - self.begun,
                )

    def earlier(self, nothing, same=""):
        """The report in --out, to go on with, or ``nothing`` where ``same`` in it is another."""
        if self.out is None or not self.out.is_file():
            return nothing
        parsed = json.loads(self.out.read_text())
        return nothing if same and parsed.get(same) != nothing[same] else parsed


def logged(log):
    """Rows of a log of JSON lines, a path; none where there is no file, or no log (None)."""
    if log is None or not log.is_file():
        return []
    return [json.loads(line) for line in log.read_text("utf-8").splitlines()]


def add_to_log(log, row):
    """Append a row to a log, if there is one."""
    if log is not None:
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def machine(*packages):
    """What a time depends on: the load of others, cores, versions."""
    return {
        "cores": os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: metadata.version(name) for name in ("mfopt", *packages)},
    }


def cpu(call, *arguments):
    """(result, CPU seconds of all threads): a busy machine changes them little."""
    begun = time.process_time()
    result = call(*arguments)
    return result, time.process_time() - begun


def in_turn(first, second, rounds):
    """The ratio of two times, in turn in one process, who is first taking turns.

    Whatever else runs on the machine meets both alike, so the median of many ratios is worth more
    than the ratio of two runs.
    """
    times = np.zeros((rounds, 2))
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            times[number, which] = (first, second)[which]()
    ratios = times[:, 0] / times[:, 1]
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return {
        "ratio": float(middle),
        "quartiles": [float(low), float(high)],
        "rounds": rounds,
        "cpu_seconds": [float(x) for x in np.median(times, axis=0)],
    }


def mean(values):
    """Mean of repeated values and its standard error."""
    error = float(np.std(values, ddof=1) / math.sqrt(len(values)))
    return {"mean": float(np.mean(values)), "standard_error": error}

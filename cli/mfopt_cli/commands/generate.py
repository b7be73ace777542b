"""``mfopt generate``: text from a trained model."""

from __future__ import annotations

from types import SimpleNamespace

import click

from mfopt._runtime import _check
from mfopt_cli import display, options
from mfopt_cli.options import MOST_POINTS, Count, option


@options.command("generate")
@click.argument("model", type=click.Path())
@option("--prompt", str, "Begin with this text [default: a new text].", may_be_empty=True)
@option("--tokens", Count(10**6), "Maximum number of new tokens per text.", default=64)
@option("--texts", Count(MOST_POINTS), "Number of texts.", default=1)
@option("--temperature", float, "Sampling temperature; 0: greedy decoding.", default=1.0)
@options.seed("of the draws", default=0)
@options.json_flag
def command(arguments: SimpleNamespace) -> None:
    """Generate texts with MODEL, the folder of a run or of its model.

    What a model says follows from its parameters: the guarantee of its run covers it.

    \b
    Example:
      mfopt generate run --prompt "def " --texts 3
    """
    from mfopt.training.generation import generate
    from mfopt.training.models.huggingface import load_pretrained
    from mfopt.training.tokenizers import Tokenizer

    _check.integer("texts", arguments.texts)
    folder = _check.path("model", arguments.model)
    if (folder / "model").is_dir():
        folder = folder / "model"
    loaded, tokenizer = load_pretrained(folder), Tokenizer.load(folder)
    prompt = arguments.prompt or ""
    begin = tokenizer.encode(prompt, end=False).tolist() or [tokenizer.end_id]
    said = []
    for number in range(arguments.texts):
        drawn = generate(
            loaded,
            begin,
            tokens=arguments.tokens,
            temperature=arguments.temperature,
            end=tokenizer.end_id,
            seed=arguments.seed + number,
        )
        said.append(prompt + tokenizer.decode(list(drawn)))
    if arguments.as_json:
        display.json_object({"texts": said})
        return
    for number, text in enumerate(said):
        if number:
            display.print_text("-" * 8)
        display.print_text(text)

"""``mfopt generate``: text from a trained model."""

from __future__ import annotations

import click

from mfopt._runtime import _check
from mfopt_cli import display, options


@click.command(cls=options.Command)
@click.argument("model", type=click.Path())
@options.option(
    "--prompt", default="", may_be_empty=True, help="Begin with this text. [default: a new text]"
)
@options.option(
    "--tokens",
    type=options.Count(10**6),
    default=64,
    show_default=True,
    help="Maximum number of new tokens per text.",
)
@options.option(
    "--texts",
    type=options.Count(options.MOST_POINTS),
    default=1,
    show_default=True,
    help="Number of texts.",
)
@options.option(
    "--temperature",
    default=1.0,
    show_default=True,
    help="Sampling temperature; 0: greedy decoding.",
)
@options.seed("of the draws", default=0, show_default=True)
@options.json_flag
def command(
    model: str,
    prompt: str,
    tokens: int,
    texts: int,
    temperature: float,
    seed: int,
    as_json: bool,
) -> None:
    """Generate texts with MODEL, the folder of a run or of its model.

    What a model says follows from its parameters: the guarantee of its run covers it.

    \b
    Example:
      mfopt generate run --prompt "def " --texts 3
    """
    from mfopt.training.generation import generate
    from mfopt.training.models.huggingface import load_pretrained
    from mfopt.training.tokenizers import Tokenizer

    _check.integer("texts", texts)
    folder = _check.path("model", model)
    if (folder / "model").is_dir():
        folder = folder / "model"
    loaded, tokenizer = load_pretrained(folder), Tokenizer.load(folder)
    begin = tokenizer.encode(prompt, end=False).tolist() or [tokenizer.end_id]
    said = []
    for number in range(texts):
        drawn = generate(
            loaded,
            begin,
            tokens=tokens,
            temperature=temperature,
            end=tokenizer.end_id,
            seed=seed + number,
        )
        said.append(prompt + tokenizer.decode(list(drawn)))
    if as_json:
        display.json_object({"texts": said})
        return
    for number, text in enumerate(said):
        if number:
            display.print_text("-" * 8)
        display.print_text(text)

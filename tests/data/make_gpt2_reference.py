"""Make the small random GPT-2 checkpoint and its reference logits: ``gpt2-reference/``.

Run once, by hand, where torch and transformers are installed (tests need neither):

    python tests/data/make_gpt2_reference.py

The checkpoint is written by transformers itself; the logits and the loss are computed by its
GPT2LMHeadModel in float64. Every parameter is random, biases and layer norms too, so that none can
be dropped or swapped unseen; the inner width is not 4 times the outer one.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

FOLDER = Path(__file__).parent / "gpt2-reference"


def main():
    torch.manual_seed(20240601)
    config = GPT2Config(
        vocab_size=61,
        n_positions=12,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_inner=40,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + 0.3 * torch.randn_like(parameter))
    model.save_pretrained(FOLDER, safe_serialization=True)
    (FOLDER / "generation_config.json").unlink()
    tokens = torch.randint(0, config.vocab_size, (3, config.n_positions))
    with torch.no_grad():
        wide = model.double()
        logits = wide(tokens).logits
        losses = [wide(row[None], labels=row[None]).loss.item() for row in tokens]
    np.savez(FOLDER / "reference.npz", tokens=tokens.numpy(), logits=logits.numpy(), losses=losses)


if __name__ == "__main__":
    main()

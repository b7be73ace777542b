"""The Trainer of Hugging Face with a factorization's noise and batches, on scikit-learn's digits.

python notebooks/digits_trainer.py artifacts/factorizations/blt-4-8x32-eps8.npz
"""

import sys
import tempfile

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import TrainingArguments

import mfopt
from mfopt.torch.huggingface import PrivateTrainer

SETTINGS = {"max_grad_norm": 1.0, "report_to": "none", "save_strategy": "no", "use_cpu": True}


class Network(torch.nn.Module):
    """A network that gives its loss, as models of transformers do."""

    def __init__(self):
        super().__init__()
        hidden = torch.nn.Linear(64, 32)
        self.layers = torch.nn.Sequential(hidden, torch.nn.Tanh(), torch.nn.Linear(32, 10))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def main(path: str, rate: float = 0.5, seed: int | None = None) -> float:
    """Accuracy on held-out digits; ``seed`` pins the run, which then protects nothing."""
    images, labels = load_digits(return_X_y=True)
    x, test_x, y, test_y = train_test_split(images / 16, labels, test_size=0.2, random_state=0)
    data = [{"x": torch.tensor(a).float(), "labels": int(b)} for a, b in zip(x, y, strict=True)]
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    factorization = mfopt.load(path)
    with tempfile.TemporaryDirectory() as folder:
        plan = TrainingArguments(folder, num_train_epochs=factorization.sampling.epochs, **SETTINGS)
        trainer = PrivateTrainer(
            model,
            plan,
            train_dataset=data,
            optimizers=(optimizer, constant),
            factorization=factorization,
            seed=seed,
            allow_uncertified=seed is not None,
        )
        trainer.train()
    print(f"{trainer.run.step} of {len(trainer.run.sampler)} steps; {factorization.guarantee}")
    predicted = model(torch.tensor(test_x).float())["logits"].argmax(1).numpy()
    return float((predicted == test_y).mean())


if __name__ == "__main__":
    print(f"{main(*sys.argv[1:2]):.1%} of held-out digits")

"""The Trainer of Hugging Face with a factorization's noise and batches, on scikit-learn's digits.

python notebooks/digits_trainer.py artifacts/factorizations/blt-4-8x32-eps8.npz
"""

import sys
import tempfile

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import Trainer, TrainerCallback, TrainingArguments

import mfopt
from mfopt.torch import PrivateRun

SETTINGS = {"max_grad_norm": 0.0, "report_to": "none", "save_strategy": "no", "use_cpu": True}


def loss(model, batch):
    """The loss of a batch; it is called for one example at a time."""
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"])


def main(path: str, rate: float = 0.5, seed: int | None = None) -> float:
    """Accuracy on held-out digits; ``seed`` pins the run, which then protects nothing."""
    images, labels = load_digits(return_X_y=True)
    x, test_x, y, test_y = train_test_split(images / 16, labels, test_size=0.2, random_state=0)
    data = [{"x": torch.tensor(a).float(), "labels": int(b)} for a, b in zip(x, y, strict=True)]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    factorization = mfopt.load(path)
    run = PrivateRun(factorization, len(data), max_grad_norm=1.0, seed=seed)
    run.attach(optimizer)

    class PrivateTrainer(Trainer):
        def get_train_dataloader(self):
            return run.loader(data)

        def training_step(self, model, inputs, num_items_in_batch=None):
            return run.backward(model, loss, self._prepare_inputs(inputs))

    class Report(TrainerCallback):
        def on_train_end(self, args, state, control, **rest):
            print(f"{run.step} of {len(run.sampler)} steps; {factorization.guarantee}")

    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    with tempfile.TemporaryDirectory() as folder:
        plan = TrainingArguments(folder, num_train_epochs=factorization.sampling.epochs, **SETTINGS)
        tools = {"optimizers": (optimizer, constant), "callbacks": [Report()]}
        PrivateTrainer(model, plan, train_dataset=data, **tools).train()
    found = model(torch.tensor(test_x).float()).argmax(1).numpy()
    return float((found == test_y).mean())


if __name__ == "__main__":
    print(f"{main(*sys.argv[1:2]):.1%} of held-out digits")

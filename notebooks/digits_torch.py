"""PyTorch without Opacus: the three parts of a private run, on scikit-learn's digits.

python notebooks/digits_torch.py artifacts/factorizations/blt-4-8x32-eps8.npz
"""

import sys

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mfopt
from mfopt.torch import PrivateRun


def loss(model, batch):
    """The loss of a batch, as ever; it is called for one example at a time."""
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def main(path: str, rate: float = 0.5, seed: int | None = None) -> float:
    """Accuracy on held-out digits; ``seed`` pins the run, which then protects nothing."""
    images, labels = load_digits(return_X_y=True)
    x, test_x, y, test_y = train_test_split(images / 16, labels, test_size=0.2, random_state=0)
    data = torch.utils.data.TensorDataset(torch.tensor(x).float(), torch.tensor(y))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)

    factorization = mfopt.load(path)
    pinned = {"seed": seed, "allow_uncertified": seed is not None}  # in tests
    run = PrivateRun(factorization, len(data), max_grad_norm=1.0, **pinned)
    loader = run.loader(data)  # the batches of the factorization
    run.attach(optimizer)  # every step adds its noise and divides
    for _ in range(factorization.sampling.epochs):
        for batch in loader:
            run.backward(model, loss, batch)  # the sum of clipped gradients
            optimizer.step()
            optimizer.zero_grad()

    found = model(torch.tensor(test_x).float()).argmax(1).numpy()
    accuracy = float((found == test_y).mean())
    print(f"{accuracy:.1%} of held-out digits; {factorization.guarantee}")
    return accuracy


if __name__ == "__main__":
    main(*sys.argv[1:2])

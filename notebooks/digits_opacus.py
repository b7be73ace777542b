"""The loop of Opacus with a factorization's noise and batches, on scikit-learn's digits.

python notebooks/digits_opacus.py artifacts/factorizations/blt-4-8x32-eps8.npz
"""

import sys

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mfopt
from mfopt.torch import make_private


def main(path: str, rate: float = 0.5, seed: int | None = None) -> float:
    """Accuracy on held-out digits; ``seed`` pins the run, which then protects nothing."""
    images, labels = load_digits(return_X_y=True)
    x, test_x, y, test_y = train_test_split(images / 16, labels, test_size=0.2, random_state=0)
    data = torch.utils.data.TensorDataset(torch.tensor(x).float(), torch.tensor(y))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)

    factorization = mfopt.load(path)
    model, optimizer, loader = make_private(
        model,
        optimizer,
        data,
        factorization,
        max_grad_norm=1.0,
        seed=seed,
        allow_uncertified=seed is not None,
    )
    for _ in range(factorization.sampling.epochs):
        for batch, target in loader:  # of a batch of nobody the step is noise only
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch), target).backward()
            optimizer.step()

    model.eval()  # a training pass takes batches of the loader only
    predicted = model(torch.tensor(test_x).float()).argmax(1).numpy()
    accuracy = float((predicted == test_y).mean())
    print(f"{accuracy:.1%} of held-out digits; {factorization.guarantee}")
    return accuracy


if __name__ == "__main__":
    main(*sys.argv[1:2])

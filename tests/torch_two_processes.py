"""One of two processes of a private run over gloo: RANK STORE OUT."""

import sys
import warnings

import torch

warnings.filterwarnings("ignore")


def main(rank: int, store: str, out: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    import test_torch_run
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as Distributed
    from test_torch_run import data, epoch, loss_of, plain, with_opacus

    from mfopt.errors import UsageError
    from mfopt.torch import PrivateRun

    test_torch_run.torch = torch  # which a fixture imports there
    found = {}
    try:
        with_opacus(model=network())
    except UsageError as error:
        found["refused"] = str(error)
    model, optimizer, loader = with_opacus(model=Distributed(network()))
    epoch(model, optimizer, loader, stop=3)
    found["opacus"] = [p.detach() for p in model.parameters()]
    state = loader._run.keys.open(optimizer.state_dict()["mfopt_noise"])
    found["buffers"] = "key" in state["noise"]
    torch.manual_seed(rank)
    try:
        uneven = torch.optim.SGD(torch.nn.Linear(4, 3).parameters(), lr=1.0)
        PrivateRun(test_torch_run.factorization(), 12, 0.5).attach(uneven)
    except UsageError as error:
        found["unequal"] = str(error)
    run, model, optimizer = plain()
    for place, batch in enumerate(run.loader(data())):
        run.backward(model, loss_of, batch)
        optimizer.step()
        optimizer.zero_grad()
        if place == 2:
            break
    found["plain"] = [p.detach() for p in model.parameters()]
    torch.save(found, out)
    torch.distributed.destroy_process_group()


def network() -> torch.nn.Module:
    from test_torch_run import network

    return network()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])

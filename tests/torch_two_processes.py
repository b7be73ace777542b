"""One of two processes of a private run over gloo: RANK STORE OUT."""

import sys
import warnings

import torch

warnings.filterwarnings("ignore")


def main(rank, store, output):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    import test_torch_run
    from test_torch_run import epoch, made_private, network, plain

    from mfopt.torch import PrivateRun

    model, optimizer, loader = made_private()
    epoch(model, optimizer, loader, stop=3)
    actual = {"loop of opacus": [p.detach() for p in model.parameters()]}
    _, arrays = loader.run.keys.open(optimizer.state_dict()["mfopt_noise"])
    actual["buffers"] = "key" in arrays
    torch.manual_seed(rank)
    uneven = torch.nn.Linear(4, 3)
    run = PrivateRun(test_torch_run.factorization(), 12, 0.5)
    run.attach(torch.optim.SGD(uneven.parameters(), lr=1.0))
    actual["first"] = uneven.weight.detach()
    run, model, optimizer = plain()
    go(run, model, optimizer, 3)
    actual["plain"] = [p.detach() for p in model.parameters()]
    for variant in (zero, sharded):
        run, model, optimizer = variant()
        with torch.no_grad():
            model(torch.ones(2, 4))  # leaves whole parameters in a sharded model
        go(run, model, optimizer, 2)
        if variant is sharded:
            size = sum(p.numel() for p in network().parameters())
            arrays = run.noise.contents()[1]
            kept = sum(array.size for name, array in arrays.items() if name != "key")
            assert kept < 0.6 * size * run.stream.recursion.slots, kept
        if variant is zero:
            optimizer.consolidate_state_dict(to=0)
            states = [optimizer.state_dict() if rank == 0 else None]
            torch.distributed.broadcast_object_list(states, src=0)
            state = states[0]
        else:
            state = optimizer.state_dict()
        _, repeated, other = resumed = variant(seed=5)
        repeated.load_state_dict(model.state_dict())
        other.load_state_dict(state)
        go(*resumed, 1)
        whole = [p.full_tensor() if variant is sharded else p for p in repeated.parameters()]
        actual[variant.__name__] = [p.detach() for p in whole]
    run, model, optimizer = sharded(seed=None)
    go(run, model, optimizer, 1)
    states = [optimizer.state_dict()]
    go(run, model, optimizer, 1)
    states.append(optimizer.state_dict())
    _, _, other = sharded(seed=None)
    actual["steps"] = refusal(lambda: other.load_state_dict(states[rank]))
    run, model, optimizer = sharded()
    next(iter(run.loader(test_torch_run.data())))
    model(torch.ones(2, 4)).sum().backward()
    actual["gradients"] = refusal(optimizer.step)
    torch.save(actual, output)
    torch.distributed.destroy_process_group()


def refusal(call):
    from mfopt.errors import UsageError

    try:
        call()
    except UsageError as error:
        return str(error)
    return "not refused"


def go(run, model, optimizer, steps):
    from test_torch_run import data, loss_of

    for index, batch in enumerate(run.loader(data())):
        run.backward(model, loss_of, batch)
        optimizer.step()
        optimizer.zero_grad()
        if index + 1 == steps:
            break


def zero(**options):
    from test_torch_run import network, plain
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = network()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    return plain(model, optimizer=optimizer, **options)


def sharded(**options):
    from test_torch_run import network, plain
    from torch.distributed.fsdp import fully_shard

    model = network()
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for layer in (model[0], model):  # the last has parameters of its own
        fully_shard(layer, mesh=mesh)
    return plain(model, **options)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])

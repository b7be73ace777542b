"""Run by test_train_mesh.py in a process of its own: a short private run on a given mesh."""

import json
import sys


def main(arguments):
    """Train as ``arguments`` say and write the final parameters."""
    settings = json.loads(arguments)
    import jax
    import numpy as np
    import optax
    from train_fixtures import synthetic_store

    from mfopt import sampling
    from mfopt.noise import NoiseStream
    from mfopt.strategies import BLT
    from mfopt.training import mesh as meshes
    from mfopt.training.checkpoint import Checkpoints
    from mfopt.training.clipping import Clipping
    from mfopt.training.loop import Execution, Trainer
    from mfopt.training.models.families import gpt2_config
    from mfopt.training.models.huggingface import gpt2_model
    from mfopt.training.secrets import RunSecret
    from mfopt.training.units import UserUnits

    if settings["default_device"] is not None:
        jax.config.update("jax_default_device", jax.devices()[settings["default_device"]])
    mesh = None
    if settings["mesh"]:
        mesh = meshes.make_mesh()
    store = synthetic_store(num_users=16, empty_users=(3,))
    model = gpt2_model(gpt2_config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    units = UserUnits(store, records=2, length=8, seed=5)
    scheme = sampling.BallsInBins(bins=2, epochs=2)
    sampler = sampling.UnitSampler(scheme, 16, 7)
    blt = BLT([0.3], [0.8])
    noise = NoiseStream(blt, iterations=4, noise_multiplier=0.5, clip_norm=0.1)
    execution = Execution(units, sampler, Clipping(0.1), noise, 5.0, settings["microbatch"])
    trainer = Trainer(model, execution, optax.sgd(0.5, momentum=0.9), mesh=mesh)
    state, secret = trainer.init(np.arange(1, 9, dtype=np.uint32)), RunSecret.pinned(1)
    occupied, total = [0] * len(jax.devices()), 0
    for leaf in jax.tree.leaves((state.params, state.optimizer, state.noise)):
        total += leaf.nbytes
        for shard in leaf.addressable_shards:
            occupied[shard.device.id] += shard.data.nbytes
    with Checkpoints(settings["output"] + ".checkpoints") as checkpoints:
        for result in trainer.run(state, 2):
            state = result.state
        checkpoints.save(state, secret, {})
    with Checkpoints(settings["checkpoints"] or settings["output"] + ".checkpoints") as checkpoints:
        state = checkpoints.restore(trainer.init(), secret).state
    for result in trainer.run(state):
        state = result.state
    params = state.params
    kernel = params["h"]["0"]["mlp"]["c_fc"]["kernel"]
    shards = {str(shard.index) for shard in kernel.addressable_shards}
    if mesh is not None:
        params = jax.jit(lambda p: p, out_shardings=meshes.replicated(mesh))(params)
    if jax.process_index() == 0:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        arrays = {
            jax.tree_util.keystr(path): np.asarray(leaf.addressable_data(0))
            for path, leaf in leaves
        }
        np.savez(settings["output"], **arrays)
    facts = {"devices": len(jax.devices()), "kernel_shards": len(shards)}
    used = [device.id for leaf in jax.tree.leaves(state) for device in leaf.devices()]
    facts["used"] = sorted({*used})
    print(json.dumps(facts | {"held": max(occupied), "total": total}))


if __name__ == "__main__":
    main(sys.argv[1])

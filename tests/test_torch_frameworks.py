"""Private runs in the trainers that people use: the steps of the plain loop, also when resumed."""

import json
import os
import warnings
from pathlib import Path

import pytest
import test_torch_run as run_tests
from lazy_torch import functional, needs_torch, own_folder, torch  # noqa: F401
from test_torch_run import CLIP, SEED, loss_of, private_run

from mfopt.errors import FailureError, UsageError

pytestmark = [
    pytest.mark.ci,
    pytest.mark.filterwarnings("default"),  # of other people's packages
]


def is_right(module, steps=10):
    """Whether the parameters are those of the plain pieces after ``steps``."""
    run_tests.same(module, run_tests.expected_path()[steps - 1])


def key_is_apart(folder, run):
    """One file of mode 0600 holds the key, and no file of ``folder`` that or the noise's."""
    (file,) = Path("mfopt-keys").glob("*.key")
    assert os.stat(file).st_mode & 0o777 == 0o600
    kept = [part.read_bytes() for part in Path(folder).rglob("*") if part.is_file()]
    secrets = [run.noise._key.tobytes(), json.loads(file.read_text())["key"].encode()]
    assert any(file.stem.encode() in part for part in kept)  # its handle is there
    assert not [part for part in kept if any(secret in part for secret in secrets)]


# --- transformers ----------------------------------------------------------------------------


def hugging_face(model=None, seed=SEED, **arguments):
    """A trainer of the tiny network, whose batches are dictionaries."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from mfopt.torch.huggingface import PrivateTrainer

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = run_tests.network()

        def forward(self, x, labels=None):
            logits = self.layers(x)
            loss = None if labels is None else functional.cross_entropy(logits, labels)
            return {"loss": loss, "logits": logits}

    settings = {"num_train_epochs": 2, "max_grad_norm": CLIP, "use_cpu": True, **arguments}
    settings = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, **settings}
    data = [{"x": x, "labels": y} for x, y in run_tests.data()]
    model = Network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    return PrivateTrainer(
        model,
        transformers.TrainingArguments("out", **settings),
        train_dataset=data,
        optimizers=(optimizer, schedule),
        factorization=run_tests.factorization(),
        seed=seed,
        allow_uncertified=True,
        microbatch=3,
    )


def test_a_trainer_of_transformers_takes_the_steps_and_resumes_at_its_own():
    first = hugging_face(save_strategy="steps", save_steps=3, max_steps=7)
    first.train()
    assert first.run.step == first.state.global_step == 7
    is_right(first.model, 7)
    key_is_apart("out", first.run)
    second = hugging_face(seed=None)  # batches and noise of the checkpoint, not its own
    second.train(resume_from_checkpoint="out/checkpoint-3")
    assert second.run.step == second.state.global_step == 10
    is_right(second.model)
    with pytest.raises(FailureError, match="covers 10 iterations"):
        second.train()


def test_a_trainer_of_transformers_makes_its_own_optimizer():
    trainer = hugging_face(max_steps=2, learning_rate=0.1)
    original = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.train()
    assert type(trainer.optimizer.optimizer).__name__ == "AdamW" and trainer.run.step == 2
    assert all((p != b).any() for p, b in zip(trainer.model.parameters(), original, strict=True))


@pytest.mark.parametrize(
    ("match", "arguments"),
    [
        ("args.gradient_accumulation_steps = 2.*microbatch", {"gradient_accumulation_steps": 2}),
        (r"args\.label_smoothing_factor = 0\.1", {"label_smoothing_factor": 0.1}),
        ("args.num_train_epochs = 3: the guarantee covers 10", {"num_train_epochs": 3}),
        ("args.max_steps = 11: the guarantee covers 10", {"max_steps": 11}),
        ("max_grad_norm|clip_norm = 0", {"max_grad_norm": 0.0}),
    ],
)
def test_arguments_that_change_a_step_are_refused(match, arguments):
    with pytest.raises(UsageError, match=match):
        hugging_face(**arguments)


# --- Lightning -------------------------------------------------------------------------------


def lightning_module(manual=None):
    """The tiny network as a module; ``manual`` makes the step of a batch by itself."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = run_tests.network()
            self.automatic_optimization = manual is None

        def forward(self, x):
            return self.layers(x)

        def training_step(self, batch, batch_idx):
            if manual is not None:
                return manual(self, batch)
            loss = functional.cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    return Module()


def lightning_trainer(run, strategy=None, **options):
    from lightning.pytorch import Trainer

    from mfopt.torch.lightning import PrivateStrategy

    quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary"], False)
    options = {"max_epochs": 2, "enable_checkpointing": False, **quiet, **options}
    strategy = PrivateStrategy(run, microbatch=3) if strategy is None else strategy
    return Trainer(strategy=strategy, **options)


@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(3, id="inside an epoch"),
        pytest.param(5, marks=pytest.mark.release, id="at its end"),
    ],
)
def test_lightning_takes_the_steps_and_resumes_at_its_own(stop):
    module, run = lightning_module(), private_run()
    from lightning.pytorch.callbacks import ModelCheckpoint

    keep = ModelCheckpoint("out", "{step}", every_n_train_steps=stop, save_top_k=-1)
    trainer = lightning_trainer(run, enable_checkpointing=True, callbacks=[keep])
    trainer.fit(module, run.loader(run_tests.data()))
    assert run.step == trainer.global_step == 10
    is_right(module)
    key_is_apart("out", run)
    module, run = lightning_module(), private_run()
    trainer = lightning_trainer(run)
    trainer.fit(module, run.loader(run_tests.data()), ckpt_path=f"out/step={stop}.ckpt")
    assert run.step == trainer.global_step == 10
    is_right(module)


def test_lightning_fits_again_with_a_new_optimizer():
    module, run, steps = lightning_module(), private_run(), []
    module.on_before_optimizer_step = lambda optimizer: steps.append(run.step)
    for epochs in (1, 1):
        trainer = lightning_trainer(run, max_epochs=epochs)
        trainer.fit(module, run.loader(run_tests.data()))
    assert run.step == 10 and steps == list(range(10))
    is_right(module)


def test_lightning_with_manual_optimization():
    run = private_run()

    def by_hand(module, batch):
        run.backward(module, loss_of, batch)
        module.optimizers().step()
        module.optimizers().zero_grad()

    module = lightning_module(by_hand)
    lightning_trainer(run).fit(module, run.loader(run_tests.data()))
    assert run.step == 10
    is_right(module)


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("gradient_clip_val = 0.1.*a run clips", {"gradient_clip_val": 0.1}),
        ("not of step 0.*step before the next one", {"accumulate_grad_batches": 2}),
        ("in place of loss.backward|no optimizer yet", {"strategy": "auto"}),
        ("manual_backward = 'called'.*Call run.backward", {"manual": True}),
    ],
)
def test_wrong_loops_of_lightning_are_refused(match, options):
    run = private_run()
    manual = options.pop("manual", None) and (
        lambda module, batch: module.manual_backward(loss_of(module, batch))
    )
    module = lightning_module(manual)
    with pytest.raises(UsageError, match=match):
        lightning_trainer(run, **options).fit(module, run.loader(run_tests.data()))


# --- accelerate --------------------------------------------------------------------------------


def accelerated(attach_first=True):
    """(accelerator, run, prepared model, optimizer and loader)."""
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model, run = run_tests.network(), private_run()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if attach_first:
        run.attach(optimizer)
    prepared = accelerator.prepare(model, optimizer, run.loader(run_tests.data()))
    if not attach_first:
        run.attach(prepared[1])
    return accelerator, run, *prepared


@pytest.mark.parametrize("attach_first", [True, pytest.param(False, marks=pytest.mark.release)])
def test_accelerate_takes_the_steps_and_resumes_at_its_own(attach_first):
    accelerator, run, model, optimizer, loader = accelerated(attach_first)
    for step, batch in enumerate(loader):
        run.backward(model, loss_of, batch)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            accelerator.save_state("out")
            break
    is_right(model, 3)
    key_is_apart("out", run)
    accelerator, run, model, optimizer, loader = accelerated(attach_first)
    accelerator.load_state("out")
    for _ in range(2):
        for batch in loader:
            run.backward(model, loss_of, batch)
            optimizer.step()
            optimizer.zero_grad()
    assert run.step == 10
    is_right(model)


def test_wrong_loops_of_accelerate_are_refused():
    accelerator, run, model, optimizer, loader = accelerated()
    batch = next(iter(loader))
    accelerator.backward(loss_of(model, run_tests.data()[:2]))
    with pytest.raises(UsageError, match="in place of loss"):
        optimizer.step()
    optimizer.zero_grad()
    run.backward(model, loss_of, batch)
    optimizer.step()
    batches = iter(loader)
    with accelerator.accumulate(model):
        run.backward(model, loss_of, next(batches))
    with pytest.raises(UsageError, match="not of step"):
        run.backward(model, loss_of, next(batches))


# --- models that vmap has no rule for ------------------------------------------------------------


class Recurrent:
    """Made late: the base class is imported by the fixture."""

    def __new__(cls, kind):
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.cell = getattr(torch.nn, kind)(4, 5, batch_first=True)
                self.out = torch.nn.Linear(5, 3)

            def forward(self, x):
                return self.out(self.cell(x[:, None].expand(-1, 3, -1))[0][:, -1])

        return Model()


def checkpointed(reentrant):
    from torch.utils.checkpoint import checkpoint

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = run_tests.network()

        def forward(self, x):
            return checkpoint(self.layers[1:], self.layers[0](x), use_reentrant=reentrant)

    return Model()


def language_model(kind, **config):
    transformers = pytest.importorskip("transformers")
    size = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "GPT2":
        size = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
        size |= dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    else:
        size |= {"intermediate_size": 16, "max_position_embeddings": 8}
    if kind == "Bert":
        size |= dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob"], 0.0)
    model = {"Bert": "BertForSequenceClassification", "GPT2": "GPT2LMHeadModel"}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**size, **config)
    return getattr(transformers, model.get(kind, f"{kind}ForCausalLM"))(config)


def tokens(kind):
    ids = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1:, 4:] = 0
    labels = torch.arange(3) % 2 if kind == "Bert" else ids.where(mask > 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize(
    "kind", ["GRU", pytest.param("LSTM", marks=pytest.mark.release), "checkpoint"]
)
def test_layers_without_a_rule_go_one_example_at_a_time(kind, monkeypatch):
    from test_torch_per_example import sums_are_right

    model = checkpointed(False) if kind == "checkpoint" else Recurrent(kind)
    batch = tuple(part[:3] for part in run_tests.data().tensors)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            sums_are_right(model, loss_of, batch)
    warned = ["Model has no rule for torch.vmap" in str(report.message) for report in caught]
    assert kind == "LSTM" or sum(warned) == 1
    monkeypatch.setattr("mfopt.torch.checks.is_shard", lambda p: True)  # as after fully_shard
    with pytest.raises(UsageError, match="Use no fully_shard"):
        run_tests.backward(model, loss_of, batch, 1.0)


@pytest.mark.parametrize(
    "kind", ["GPT2", *(pytest.param(kind, marks=pytest.mark.release) for kind in ("Bert", "Llama"))]
)
def test_language_models_with_attention_masks(kind):
    from test_torch_per_example import sums_are_right

    sums_are_right(language_model(kind), lambda m, b: m(**b)["loss"], tokens(kind))


def test_reentrant_checkpoints_fail_with_the_way_out():
    batch = tuple(part[:3] for part in run_tests.data().tensors)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):  # of PyTorch
        run_tests.backward(checkpointed(True), loss_of, batch, 1.0)

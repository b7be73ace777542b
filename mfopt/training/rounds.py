"""Rounds of a federated server: who takes part is its choice, within a minimum separation."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mfopt import noise
from mfopt._runtime import _check, _files
from mfopt._runtime._types import PyTree
from mfopt.accounting import account
from mfopt.accounting.phases import beginning
from mfopt.factorization import Factorization
from mfopt.guarantee import Guarantee, require_guarantee
from mfopt.noise import ledger
from mfopt.sampling import MinSeparation
from mfopt.training.clipping import Clipping

_alive: weakref.WeakValueDictionary[Path, PrivateRounds] = weakref.WeakValueDictionary()


class PrivateRounds:
    """Clipping, noise and participations of a server whose devices come when they can.

    ::

        rounds = PrivateRounds("state", factorization, params, clip_norm=1.0, cohort=10)
        while rounds.step < len(rounds):
            devices = [name for name in available() if rounds.may_join(name)]
            updates = {name: update(name, params) for name in devices}  # of those that answered
            params = jax.tree.map(jnp.add, params, rounds.release(updates))

    A round without an answer counts too: ``release({})`` is noise. ``folder`` holds key, noise and
    participations, for its owner only, **as secret as the data**; made again with it, the object
    continues after the last round that was released. A round that was broken off is left out.

    Formal guarantee: ``print(rounds.guarantee)``, of all rounds, where a unit is a device; of those
    so far, :meth:`spent`. Refused is an update of a device too early or too often.

    Args:
      folder: of the state; made where it does not exist.
      factorization: with the sampling "min-separation".
      params: that updates have the structure and shapes of.
      clip_norm: bound on the norm of a device's update, which is scaled down to it.
      cohort: number that sums are divided by: public, not that of devices that answered.
      seed, allow_uncertified: as for :class:`mfopt.jax.PrivateRun`.
      options: of :class:`mfopt.noise.NoiseStream`.

    Raises:
      UsageError: another sampling, an estimate, or a folder of another run or one that is alive, or
        an older copy.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        factorization: Factorization,
        params: PyTree,
        *,
        clip_norm: float,
        cohort: float,
        seed: int | None = None,
        allow_uncertified: bool = False,
        **options: Any,
    ) -> None:
        options |= {"clip_norm": clip_norm, "allow_uncertified": allow_uncertified}
        self.stream = noise.from_factorization(factorization, **options)
        self.scheme = _check.kind(
            "factorization.sampling",
            factorization.sampling,
            MinSeparation,
            "Use `sampling='min-separation'`: other schemes draw their batches.",
        )
        require_guarantee(
            factorization.guarantee, pinned=seed is not None, allow_uncertified=allow_uncertified
        )
        self.factorization = factorization
        self.cohort = _check.positive("cohort", cohort)
        folder = _check.path("folder", folder)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as problem:
            rule = f"cannot be made ({problem.strerror})"
            raise _check.reject("folder", str(folder), rule) from None
        self._state_file = folder / "noise.npz"
        self._devices_file = folder / "devices.json"
        self._rounds = {}  # of each device
        place = folder.resolve()
        if place in _alive:
            rule = "belongs to rounds that are alive in this process: both would release its noise"
            way_out = "Use that object, or delete it; another run takes another folder."
            raise _check.reject("folder", str(folder), rule, way_out)
        if not self._state_file.exists():
            self._state = self.stream.init(params, seed=seed)
            noise.save_state(self._state_file, self.stream, self._state)
            _alive[place] = self
            return
        recorded = 0  # rounds whose participations are known
        if self._devices_file.exists():
            _files.require_secret("folder", self._devices_file, "It says who took part")
            stored = json.loads(self._devices_file.read_text())
            recorded = stored["rounds"]
            self._rounds = stored["devices"]
        with _check.renamed_arguments({"state": "folder", "parameters": "params"}):
            state = noise.load_state(self._state_file, self.stream, params)
        if state.counted:  # noise of a round that was broken off is not used for another sum
            kept = ledger.begin(np.asarray(state.key))
            if recorded < kept.released:
                rule = f"knows who took part in {recorded} rounds of {kept.released} released"
                way_out = "It is an older copy: take the newest one, or begin a new run."
                raise _check.reject("folder", str(folder), rule, way_out)
            state = self.stream.skip(state, max(kept.next_step, int(state.step)))
        self._state = state
        _alive[place] = self

    def __len__(self) -> int:
        return self.stream.iterations

    @property
    def step(self) -> int:
        """Rounds that are over."""
        return int(self._state.step)

    @property
    def guarantee(self) -> str:
        """Guarantee of all rounds, or "none" and the reason."""
        return self.factorization.statement(pinned=self._state.pinned)

    def spent(self) -> Guarantee | None:
        """The guarantee of the rounds that are over, at the δ of all; None before the first."""
        if not self.step:
            return None
        return account(
            beginning(self.factorization.mechanism, self.step),
            noise_multiplier=self.factorization.noise_multiplier,
            delta=self.factorization.guarantee.delta,
        )

    def may_join(self, device: str) -> bool:
        """True if ``device``, a text, may take part in the round that comes next."""
        _check.kind("device", device, str)
        try:
            self.scheme.check(np.array([*self._rounds.get(device, []), self.step]))
        except _check.UsageError:
            return False
        return True

    def release(self, updates: Mapping[str, PyTree]) -> PyTree:
        """The noised sum of the clipped updates, divided by the cohort; ends the round.

        It is returned once state and participations are on the disk.

        Args:
          updates: of the devices that answered, by their names.

        Raises:
          UsageError: a device that may not take part yet, or any more; another structure or shape.
          NoiseExhaustedError: all rounds are over.
        """
        _check.kind("updates", updates, Mapping, "Give a dict: name of a device -> its update.")
        with _check.renamed_arguments({"device": "updates"}):
            early = [name for name in updates if not self.may_join(name)]
        if early:
            rule = f"took part in rounds {self._rounds[early[0]]}: at most "
            rule += f"{self.scheme.participations} rounds, {self.scheme.separation} apart"
            raise _check.reject("updates", early[0], rule, "Ask may_join(device) before.")
        layout = self._state.layout
        total = [jnp.zeros(shape) for shape in layout.shapes]
        clip = Clipping(self.stream.clip_norm)
        for update in updates.values():
            leaves = self.stream.leaves_like(self._state, update, "updates")
            total = jax.tree.map(jnp.add, total, clip(leaves).gradient)
        for name in updates:
            self._rounds.setdefault(name, []).append(self.step)
        # on the disk before the release: a folder that knows of fewer is an older copy
        participations = json.dumps({"rounds": self.step + 1, "devices": self._rounds})
        _files.write(self._devices_file, participations, force=True, private=True)
        noised, self._state = self.stream.release(layout.treedef.unflatten(total), self._state)
        noise.save_state(self._state_file, self.stream, self._state, force=True)
        return jax.tree.map(lambda leaf: leaf / self.cohort, noised)

"""The training loop of one rank, from the first step to the report, readable top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from wholebatch.app import UserError
from wholebatch.app.tensors import kernel_choices

from .config import TrainConfig
from .progress import Progress
from .ranks.all_ranks import WaitForFirstRank, from_first_rank, on_all_ranks
from .ranks.sharding import local_parts
from .ranks.signals import Asked, Requests, Stopped, name
from .report.from_run import report_of_run
from .run.checkpoint import FILE
from .run.figures import Best, Pace, Tracker, figures_of, figures_of_step, peak_memory, start_trackers
from .run.record import Schedule, Start, describe_extension, read_record
from .run.run_folder import RunFolder
from .tasks.task import PassState, Task, not_finite


def train(
    config: TrainConfig,
    task: Task,
    path: Path,
    folder: RunFolder | None,
    progress: Progress,
    requests: Requests,
    *,
    schedule: Schedule,
    start: Start,
    device: torch.device,
) -> dict[str, Any]:
    """Run this rank's part of the training in the run folder `path`, and return the report; that of rank 0 counts.

    The global batch, its order and its augmentation depend on the seed and the step alone, and each rank takes its
    rows of it: the curve is the same for any number of ranks, up to float32's order of summation.

    Raises:
        UserError: if the numbers are no longer finite, or the folder cannot be written.
        Stopped: if a signal on any rank has requested it; the last step then has a checkpoint.
    """
    done, seconds = 0, 0.0
    if config.resume is not None and (path / FILE).exists():
        facts = task.load(path)
        done, seconds = facts["step"], facts["seconds"]
    saved_at = done
    since = schedule.extensions[-1].at if schedule.extensions else 0
    best = Best(task, config.patience, since, [] if folder is None else folder.metrics()[:done])
    progress.start(config, task, size=start.ranks, done=done, steps=schedule.steps)
    trackers = _begin(config, folder, progress, schedule, start)
    wait = WaitForFirstRank()

    def save(state: PassState, step: int) -> None:
        with _name_last_checkpoint(saved_at, requests):
            metrics = None if folder is None else folder.digest_of_metrics(step)
            task.save(path, state, step=step, seconds=seconds, metrics=metrics)
            for tracker in trackers:
                tracker.flush()
        wait()

    def save_last(step: int) -> None:
        """Save what the step has made, which no later pass has shown to be finite."""
        _check_finite(task, step)
        save(task.pass_state(), step)

    try:
        keeps_best = config.patience > 0 or config.keep_best
        is_over = from_first_rank(best.is_over, device)  # a run that ended early, and is resumed
        if done == schedule.steps and not is_over:
            progress.say("the run has made all its steps: only its test is made again (--until-step N trains on)")
        requests.begin()
        started, pace = time.monotonic() - seconds, Pace(config.batch_size)
        for step in range(done, done if is_over else schedule.steps):
            for optimizer in task.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = schedule.rate(group["peak"], step)
                optimizer.zero_grad()
            # Some losses have state that the forward pass changes; a run that resumes from here makes this pass again.
            due = step % config.checkpoint_every == 0 and step not in (0, saved_at)
            before = task.pass_state() if due else None
            loss = task.add_gradients(step)
            grad_norm = task.grad_norm()
            if not math.isfinite(grad_norm):
                raise not_finite(step, f"the norm of the gradient is {grad_norm}")
            if before is not None:  # only now the weights of the last step are known to give a finite loss and gradient
                save(before, step)
                saved_at = step
            for optimizer in task.optimizers:
                optimizer.step()
            task.after_step()

            done, seconds = step + 1, time.monotonic() - started
            metrics: dict[str, Any] = {
                "step": done,
                "loss": loss.item(),
                **task.metrics(),
                "learning_rate": task.optimizers[0].param_groups[0]["lr"],
                "grad_norm": grad_norm,
                "seconds": round(seconds, 3),
                "examples_per_second": round(pace.step(), 1),
                **peak_memory(device),
            }
            if done % config.validate_every == 0 or done == schedule.steps:
                metrics["validation"] = task.validate()
                wait()
            if folder is not None:
                with _name_last_checkpoint(saved_at, requests):
                    folder.append(metrics)
                    for tracker in trackers:
                        tracker.log(done, figures_of_step(metrics))
                progress.step(metrics)
            is_better = best.is_beaten_by(metrics)
            if "validation" in metrics and keeps_best:
                if from_first_rank(is_better, device):
                    weights = task.weights()
                    if folder is not None:
                        with _name_last_checkpoint(saved_at, requests):
                            folder.keep_best(task, weights, done)
                    wait()
                is_over = from_first_rank(best.is_over, device)
            if done < schedule.steps and not is_over and (warning := best.warning(is_kept=keeps_best)):
                progress.say(warning)
            asked = requests.combined()
            if asked.stop or asked.checkpoint:  # now, because a stop cannot wait for another pass
                save_last(done)
                saved_at = done
            if asked.stop:
                raise _end(asked, requests, progress, step=done)
            if asked.checkpoint:
                progress.say(f"a checkpoint was requested: step {done} has one")
            if is_over:
                break

        if is_over:
            more = "" if done == schedule.steps else "; --resume with --patience 0, or with a larger one, trains on"
            progress.say(
                f"ended after step {done}: no validation of the last {config.patience} was better than that of step "
                f"{best.step}, whose weights are in best.safetensors; model.safetensors and the report have the last"
                + more
            )
        if saved_at < done:  # before the test, which may meet a picture that cannot be read
            save_last(done)
        report = figures = task.test()
        wait()
        weights = task.weights()
        if folder is not None:
            choices = [asdict(choice) for choice in kernel_choices()]
            report = figures | {"seconds": round(seconds, 1), "kernels": choices}
            folder.finish(task, report, weights)
            rows = folder.metrics()
            best_metrics = rows[best.step - 1] if keeps_best and best.step else None
            page = report_of_run(
                config, task, figures, rows, read_record(path).starts,
                folder=folder.path, schedule=schedule, best=best_metrics,
            )  # fmt: skip
            folder.write_page(page)
            for tracker in trackers:
                tracker.log(done, figures_of(figures, "test/"))
    except BaseException:
        with suppress(UserError):  # of a disk that is full, which the error of the run names
            for tracker in trackers:
                tracker.close()
        raise
    for tracker in trackers:
        tracker.close()
    wait()
    asked = requests.combined()
    if asked.stop:
        raise _end(asked, requests, progress, step=done, finished=True)
    return report


def _begin(
    config: TrainConfig, folder: RunFolder | None, progress: Progress, schedule: Schedule, start: Start
) -> list[Tracker]:
    """Write the first lines of this start into the run folder, now that a checkpoint has been read. All ranks."""

    def write() -> tuple[list[Tracker], str]:
        if folder is None:
            return [], ""
        folder.begin(start, schedule.extensions)
        return start_trackers(config, folder.path, start.step)

    (trackers, missing), _ = on_all_ranks("set-up", write)
    if missing:
        progress.say(missing)
    if schedule.extensions:
        progress.say(describe_extension(*schedule.extensions[-1], schedule.warmup_steps))
    return trackers


def _check_finite(task: Task, done: int) -> None:
    """Raise UserError on all ranks unless all weights that are trained are finite after `done` steps.

    Without another pass only this shows what the last step has made of them, and a checkpoint replaces the one before.
    """

    def check() -> None:
        groups = [group["params"] for optimizer in task.optimizers for group in optimizer.param_groups]
        if not all(bool(x.isfinite().all()) for some in groups for x in local_parts(p.detach() for p in some)):
            raise not_finite(done - 1, "weights are not finite after it")

    on_all_ranks("weights", check)


@contextmanager
def _name_last_checkpoint(step: int, requests: Requests) -> Iterator[None]:
    """Add to an error of writing, such as that of a full disk, from where the run can be resumed."""
    try:
        yield
    except UserError as error:
        whole = f"the checkpoint of step {step} is whole" if step else "there is no earlier checkpoint"
        raise UserError(f"{error}; {whole}{requests.how_to_resume}") from error


def _end(asked: Asked, requests: Requests, progress: Progress, *, step: int, finished: bool = False) -> Stopped:
    """Show how to resume, wait until all ranks are done, and return the exception that ends the run."""
    stopped = f"stopped after step {step}, which has a checkpoint{requests.how_to_resume}"
    progress.say(f"{name(asked.stop)}: {'the run was finished' if finished else stopped}")
    requests.combined()  # a launcher may end the other ranks as soon as one has ended
    return Stopped(asked.stop)

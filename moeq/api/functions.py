"""The commands that decide and write, as functions. Errors are `MoeqError` and name Python arguments.

Deployment options are keywords of the same names (`gpu="H100", tp=2`), or one `Deployment`, or both: keywords win.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from moeq.api.bars import event_bar, progress_bar
from moeq.deploy.deployment import Deployment, Gpu
from moeq.deploy.options import make_deployment
from moeq.pipeline.events import Advance
from moeq.pipeline.plan.options import ConvertKeywords, ConvertOptions

if TYPE_CHECKING:
    from moeq.model import Checkpoint
    from moeq.oracle.records import Verdict
    from moeq.pipeline.convert import Conversion
    from moeq.pipeline.events import Progress
    from moeq.pipeline.plan.job import Job
    from moeq.pipeline.push import Pushed, PushTarget
    from moeq.transcode.survey import TranscodeKeywords
    from moeq.transcode.transcode import Transcoding


class DeploymentKeywords(TypedDict, total=False):
    """Deployment options as keywords; `deploy` is a TOML file with them."""

    gpu: str | Gpu
    tp: int
    ep: int
    dp: int
    pcp: int
    dtype: str
    backend: str
    engine: str
    batched: bool
    lora: bool
    eplb: bool
    redundant_experts: int
    all2all: str
    quantization: str
    package: Mapping[str, bool]
    env: Mapping[str, str]
    deploy: str | Path


class PlanKeywords(ConvertKeywords, DeploymentKeywords, total=False):
    """Options of a conversion and of its deployment."""


def _deployment(deployment: Deployment | None, where: Mapping[str, Any]) -> Deployment:
    """Return the deployment that keywords describe, on top of one that was given.

    Raises:
        MoeqError: as `moeq.deploy.options.make_deployment`.
    """
    named = {{"package": "packages"}.get(name, name): value for name, value in where.items() if value is not None}
    file = named.pop("deploy", None)
    unknown = set(named) - {field.name for field in fields(Deployment)}
    if unknown:
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    if deployment is not None:
        if not named and file is None:
            return deployment
        given = {field.name: getattr(deployment, field.name) for field in fields(Deployment)}
        named = {**given, "env": dict(deployment.env), "packages": dict(deployment.packages), **named}
    return make_deployment(named, None if file is None else Path(file))


def _split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keywords into options of the conversion and options of the deployment."""
    own = {field.name for field in fields(ConvertOptions)}
    mine = {name: value for name, value in options.items() if name in own}
    return mine, {name: value for name, value in options.items() if name not in own}


def _bytes(size: int | str | None) -> int | None:
    from moeq.pipeline.run.resources import parse_size

    return parse_size(size) if isinstance(size, str) else size


def decide(
    checkpoint: Checkpoint | str | Path,
    deployment: Deployment | None = None,
    *,
    revision: str | None = None,
    **where: Unpack[DeploymentKeywords],
) -> Verdict:
    """Decide which backend runs a checkpoint's experts on a deployment, what `convert` would write, and why.

    Args:
        checkpoint: the checkpoint, or its folder or Hub repository.
        deployment: where it is to run; keywords change it.
        revision: Hub revision.
        where: deployment options, such as `gpu="H100", tp=2`.

    Raises:
        MoeqError: `usage.already-converted`; `source.no-top-k`; a refusal that lists what fits, if the deployment names
            a backend that does not fit; `usage.no-gpu`, `usage.deployment`; `source.*` for a checkpoint that cannot be
            read.
    """
    from moeq.model import open as open_checkpoint
    from moeq.pipeline.plan.decide import decide as decide_opened

    opened = open_checkpoint(checkpoint, revision) if isinstance(checkpoint, str | Path) else checkpoint
    return decide_opened(opened, _deployment(deployment, where))


def plan(
    src: str | Path,
    deployment: Deployment | None = None,
    *,
    revision: str | None = None,
    **options: Unpack[PlanKeywords],
) -> Job:
    """Plan what `convert` with these arguments would do: `.plan` has files, units and sizes, `.answer` the decision.

    Args:
        src: local folder or Hub repository.
        deployment: where the result is to run; keywords change it.
        revision: Hub revision of `src`.
        options: options of `convert` and of the deployment.

    Raises:
        MoeqError: as `convert` does before it writes anything; `answer.lossy` if the first expert would lose numbers.
    """
    from moeq.pipeline import convert as pipeline

    own, where = _split(options)
    return pipeline.plan(src, _deployment(deployment, where), revision=revision, **own)


def convert(
    src: str | Path,
    dst: str | Path,
    deployment: Deployment | None = None,
    *,
    revision: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    plan: Job | str | Path | None = None,
    workers: int | None = None,
    max_memory: int | str | None = None,
    shard: str | None = None,
    executor: str = "local",
    ray_address: str | None = None,
    stream_source: bool = False,
    reread: bool = False,
    push: str | None = None,
    public: bool = False,
    base_model: str | None = None,
    sign: str | Path | None = None,
    progress: Progress | bool = False,
    **options: Unpack[PlanKeywords],
) -> Conversion:
    """Repack a checkpoint's experts for a deployment. Nothing is done where `dst` holds the same job's result.

    Args:
        src: local folder or Hub repository.
        dst: folder to create. If it exists, it must be this job's result, or with `force` any output of moeq.
        deployment: where the result is to run; keywords change it. With `tp` or `ep` above 1 the result serves every
            rank: one packing that loaders slice if the layout allows it, otherwise one packing per rank.
        revision: Hub revision of `src`.
        force: replace an earlier conversion at `dst`.
        dry_run: plan only; nothing is written.
        plan: result of `moeq.plan`, or a file of `moeq plan -o`: carry it out, or refuse if it no longer applies.
        workers: threads; None: one per core, at most 8. They do not change the written bytes.
        max_memory: bytes that this process must not exceed, or a text such as `8GiB`; workers are lowered to fit. None:
            workers are lowered to stay below 1 GiB, though one worker may need more.
        shard: do only this shard of the units, `3/8`, and leave publishing to `finalize`. Any number of processes may
            do shards at once if all see `dst` and the source.
        executor: `local`, or `ray` for a Ray cluster whose nodes see `dst` and the source.
        ray_address: address of the cluster; None takes the one that Ray finds, or starts one here.
        stream_source: fetch the files of a repository one after the other and drop them, so that disk never holds
            them all.
        reread: read the tensors of the source twice and compare, against faults of memory, disk and network.
        push: repository of the Hub to upload the result to.
        public: if the repository has to be created, make it public.
        base_model: the source's repository, for the model card.
        sign: minisign secret key to sign the manifest with; with `shard`, give it to `finalize` instead.
        progress: True for a bar, or a function that takes events (`moeq.pipeline.events`).
        options: `layout`, `force_layout`, `regroup`, `skip_unfit`, `allow_lossy`, `no_code`, and deployment options.

    Raises:
        MoeqError: `answer.no-backend` if nothing fits; `usage.layout-does-not-fit`, `usage.mixed-experts`, `usage.tp`,
            `usage.ep`, `usage.group-cut`, `answer.lossy`; `usage.destination-exists`, `usage.destination-is-source`,
            `usage.foreign-folder`, `usage.foreign-files`, `usage.other-job`, `usage.running`, `usage.other-plan`;
            `usage.already-converted`; `usage.force-shard`, `usage.executor`, `usage.stream-source`;
            `environment.ray-*`; `resources.disk-full`, `resources.memory`, `resources.ray-memory`; `source.changed`,
            and other `source.*` for damaged input.
    """
    from moeq.pipeline import convert as pipeline
    from moeq.pipeline.plan.job import Job
    from moeq.pipeline.plan_document import PlanFile, read_plan
    from moeq.report.publishing import open_push

    own, where = _split(options)
    digest = None
    if plan is not None:
        planned = PlanFile(plan.plan.digest, plan.request) if isinstance(plan, Job) else read_plan(Path(plan))
        digest = planned.digest
        if planned.request is not None:
            deployment = deployment or planned.request.deployment
            own = {**asdict(planned.request.options), **own}
    target = None if push is None or dry_run else open_push(push, base_model, public=public)
    with event_bar(progress, "convert") as tell:
        conversion = pipeline.convert(
            src,
            dst,
            _deployment(deployment, where),
            revision=revision,
            force=force,
            dry_run=dry_run,
            workers=workers,
            max_memory=_bytes(max_memory),
            plan_digest=digest,
            shard=shard,
            executor=executor,
            ray_address=ray_address,
            stream_source=stream_source,
            reread=reread,
            sign=None if sign is None else Path(sign),
            progress=tell,
            **own,
        )
    if target is not None:
        _pushed(Path(dst), target, base_model, sign, progress if isinstance(progress, bool) else False)
    return conversion


def finalize(
    dst: str | Path,
    *,
    force: bool = False,
    workers: int | None = None,
    sign: str | Path | None = None,
    progress: Progress | bool = False,
) -> Conversion:
    """Check that shards have done all units of a conversion, and publish it.

    Args:
        dst: the folder to create, the `dst` of `convert`.
        force: replace an earlier conversion at `dst`.
        workers: threads that check units.
        sign: minisign secret key to sign the manifest with.
        progress: True for a bar, or a function that takes events.

    Raises:
        MoeqError: `usage.nothing-to-finalize`, `answer.units-missing`, `answer.units-contradict`, `usage.other-job`,
            `source.changed`, `usage.destination-exists`.
    """
    from moeq.pipeline.finalize import finalize as publish

    with event_bar(progress, "finalize") as tell:
        key = None if sign is None else Path(sign)
        return publish(dst, force=force, sign=key, workers=workers, progress=tell)


def transcode(
    src: str | Path,
    dst: str | Path | None = None,
    *,
    to: str,
    check_only: bool = False,
    revision: str | None = None,
    force: bool = False,
    shard: str | None = None,
    executor: str = "local",
    ray_address: str | None = None,
    stream_source: bool = False,
    reread: bool = False,
    workers: int | None = None,
    max_memory: int | str | None = None,
    progress: Progress | bool = False,
    **options: Unpack[TranscodeKeywords],
) -> Transcoding:
    """Write the same values in another checkpoint format, which engines load directly.

    Args:
        src: local folder or Hub repository.
        dst: folder to create; with `check_only` none is needed.
        to: format, such as `compressed-tensors`.
        check_only: transcode and compare in memory; write nothing.
        revision: Hub revision of `src`.
        force: replace an earlier transcoding; nothing else may stand at `dst`.
        shard: do only this shard of the units (`3/8`); the same call without it does what is left and publishes.
        executor: `local`, or `ray` for a Ray cluster whose nodes see `dst` and the source.
        ray_address: address of the cluster; None takes the one that Ray finds, or starts one here.
        stream_source: fetch the files of a repository one after the other and drop them.
        reread: read the tensors of the source twice and compare, against faults of memory, disk and network.
        workers: threads; None: one per core, at most 8. They do not change the written bytes.
        max_memory: bytes that this process must not exceed, or a text such as `8GiB`. None: workers are lowered to
            stay below 1 GiB.
        progress: True for a bar, or a function that takes events.
        options: `regroup` (size of the groups of integer codes), `names` (spelling of the experts' names),
            `allow_lossy` (write the nearest values where some do not fit), `sort_act_order` (sort the columns of down
            projections by activation order), `numa` (NUMA nodes that `kt-amx-int4` and `kt-amx-int8` are cut for).

    Raises:
        MoeqError: `usage.target`, `usage.regroup`, `usage.names`, `usage.act-order`, `usage.stream-source`;
            `answer.not-exact`, `answer.zero-points`; `usage.destination-exists`, `usage.other-job`, `usage.running`;
            `resources.disk-full`, `resources.memory`; `source.*` for damaged input.
    """
    from moeq.transcode import transcode as transcoding

    limit = _bytes(max_memory)
    if check_only:
        with progress_bar(progress if isinstance(progress, bool) else False, "transcode") as advance:
            return transcoding.check(
                src,
                to,
                revision=revision,
                workers=workers,
                max_memory=limit,
                advance=advance,
                **options,
            )
    if dst is None:
        raise TypeError("transcode() needs dst, unless check_only is True")
    with event_bar(progress, "transcode") as tell:
        return transcoding.transcode(
            src,
            dst,
            to,
            revision=revision,
            force=force,
            workers=workers,
            max_memory=limit,
            shard=shard,
            executor=executor,
            ray_address=ray_address,
            stream_source=stream_source,
            reread=reread,
            progress=tell,
            **options,
        )


def push(
    dst: str | Path,
    repo: str,
    *,
    public: bool = False,
    base_model: str | None = None,
    sign: str | Path | None = None,
    progress: Advance | bool = False,
) -> Pushed:
    """Upload a conversion to the Hub, with a model card, as one commit.

    Args:
        dst: output of `convert`.
        repo: repository, `org/name`; created where it does not exist.
        public: if the repository has to be created, make it public.
        base_model: the source's repository, for the card.
        sign: minisign secret key to sign the uploaded manifest with.
        progress: True for a bar, or a function that takes bytes done, all bytes, and a label.

    Raises:
        MoeqError: `usage.push-name`, `usage.push-target`, `environment.hub-token`, `environment.hub`,
            `environment.hub-upload`, `usage.not-converted`, `source.*`.
    """
    from moeq.report.publishing import open_push

    return _pushed(Path(dst), open_push(repo, base_model, public=public), base_model, sign, progress)


def _pushed(
    folder: Path, target: PushTarget, base_model: str | None, sign: str | Path | None, progress: Advance | bool
) -> Pushed:
    from moeq.report.publishing import push_with_card

    with progress_bar(progress, "push") as advance:
        return push_with_card(folder, target, base_model, None if sign is None else Path(sign), progress=advance)

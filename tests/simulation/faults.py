"""Steps of programs: ranks that are replaced or stand still, and hosts that are cut off."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import bandmaster as bm
from simulation import sync
from simulation.drawn import LATE_S, Raised, Sent
from simulation.ranks import Plan
from simulation.turns import HOOK
from simulation.world import START

if TYPE_CHECKING:
    from simulation.program import Program

ENDED_S = 5.0 + 2.0 + 0.5  # from `stall_after` to the error of a thread that waits: see docs/stalls.md
RENEWED_S = 120.0  # most that a renewal takes, during which other calls may have to end
NOTICED_S = 2.0 + 0.5  # after `stall_after`: the goal, and what a busy machine adds


def renew(program: Program, draw: random.Random) -> None:
    """Restart the group, or replace a rank."""
    program.is_renewed = True
    group = program.callers if program.callers is not None and draw.random() < 0.5 else program.whole
    program.world.note("renews", group.name)
    program.n_renewing += 1
    try:
        if draw.random() < 0.5:
            group.restart()
        else:
            group.replace(draw.randrange(program.kind.n_ranks))
    except (bm.UsageError, bm.WorkerDied, bm.CallCancelled, bm.ConstructorError, bm.RemoteError) as error:
        is_hooks = isinstance(error.__cause__, Raised) and error.__cause__.args[0] == HOOK
        program.world.check(type(error) is not bm.RemoteError or is_hooks, "a renewal fails as no hook does", error)
        program.world.note("cannot renew", type(error).__name__)
    finally:
        program.n_renewing -= 1


def close(program: Program, draw: random.Random) -> None:
    """Close a group, which other threads use."""
    program.is_renewed = program.is_closing = True
    rival = None if program.turns is None else program.turns.rival
    group = draw.choice([one for one in (program.whole, program.callers, rival) if one is not None])
    its = (group, program.group, program.other) if group is program.whole else (group,)
    calls = [sent for sent in program.calls if not sent.is_operation and program.group_of(sent) in its]
    program.world.note("closes", group.name)
    group.close()
    sync.sleep(LATE_S)  # in which threads that have just read a failure note it
    left = [sent.token for sent in calls if sent.future is not None and not sent.future.done()]
    program.world.check(program.is_cut or not left, "calls of a closed group go on", left)


def cut(program: Program, draw: random.Random) -> None:
    """Cut a host off, or kill its agent."""
    program.is_renewed = program.is_cut = True
    network = program.world.network  # type: ignore[attr-defined]
    processes = sorted({task.process for task in program.world.tasks if task.process.startswith("host")})
    if processes:
        process = draw.choice(processes)
        if draw.random() < 0.3:
            network.gone.add(process)
            program.world.zygote.kill_agent(process)  # type: ignore[attr-defined]
        else:
            seconds = draw.choice([0.1, 1.0, 30.0])
            program.world.note("cut off", process, seconds)
            network.cut_off(process, seconds)


def stall(program: Program, draw: random.Random) -> None:
    """Have a rank stand still or compute, and check who is told of it."""
    world, kind = program.world, program.kind
    for sent in [one for one in program.calls if kind.passing and one.future is not None]:
        program.wait(sent, None)  # else it is the call of the rows that stands still, which has a limit of its own
    after_s, shape = draw.choice([2.0, 5.0]), draw.choice(["stopped", "idle", "busy"])
    lasts_s = after_s * draw.choice([0.4, 3.0, 6.0])
    token = next(program.tokens)
    plans = {0: Plan(lasts_s, is_busy=shape == "busy")}
    if shape == "stopped":
        program.is_cut = True  # its replies come late
        plans = {0: Plan(1e-4)}
        ranks = world.zygote.groups[program.group.name].ranks  # type: ignore[attr-defined]
        ranks[0].stop()
        world.after(lasts_s, ranks[0].go_on)
    sent = program.by_token[token] = Sent(token, "work", plans)
    began, n_before = world.now, len(bm.stalls())
    world.note("stalls", token, shape, after_s, lasts_s)
    try:
        program.judge(sent, program.group.work.options(stall_after=after_s, timeout=None)(token))
    except bm.BandmasterError as error:
        program.judge(sent, error)
        return  # as a rank has died, or is being replaced
    told = [stall for stall in bm.stalls()[n_before:] if stall.method.endswith(".work")]
    told = [one for one in told if one.at - 1.7e9 + START - one.seconds > began - 0.1]  # not of an earlier call
    if shape == "busy" or lasts_s < after_s:
        is_told = any(0 in one.ranks for one in told)  # others may run long requests, behind which the call waits
        world.check(not is_told or kind.n_threads > 0, "a notice of a call that goes on", token, shape, told)
    elif kind.n_threads == 0:
        world.check(bool(told), "nobody was told of a call that stands still", token, shape, after_s, lasts_s)
        if shape == "idle":  # the rank may have ended earlier calls first
            began = max(began, program.ended(sent) - lasts_s)
        late_s = told[0].at - 1.7e9 + START - began - after_s if told else 0.0
        world.check(late_s < NOTICED_S, f"told {late_s:.1f} s late of a call that stands still", token, shape)


def act(program: Program, draw: random.Random) -> None:
    """Have a call stand still whose policy ends it, and perhaps a rank or the group; check that both end, and go on."""
    world, kind = program.world, program.kind
    after_s, policy = draw.choice([2.0, 5.0]), draw.choice(["raise", "replace", "restart"])
    plan = Plan(6 * after_s, is_deaf=draw.random() < 0.3)
    sent = Sent(next(program.tokens), draw.choice(["work", "ask"]), plan)
    if sent.method == "work":
        sent.plans = {draw.randrange(kind.n_ranks): plan}
    program.by_token[sent.token] = sent
    program.is_renewed = True
    world.note("stands still", sent.token, sent.method, plan, after_s, policy)
    began = world.now
    try:
        method = getattr(program.group_of(sent), sent.method).options(
            stall_after=after_s, on_stall=policy, timeout=None
        )
        value = method(sent.token)
        program.judge(sent, value if sent.method == "work" else value.result())
    except bm.Stalled as error:
        sent.cancel_at(world.now)
        world.note("is stalled", sent.token, error.renewal is not None)
        world.check((error.renewal is None) == (policy == "raise"), "the policy of another call", policy, error)
        late_s = world.now - began - after_s
        world.check(not program.is_alone or late_s < ENDED_S, f"a call is ended {late_s:.1f} s late", sent.token)
        in_turn = program.turns is not None and any(name == world.current.name for name, _ in program.turns.inside)
        if error.renewal is not None and not in_turn:  # which a turn of both groups holds up
            sync._block(error.renewal.done, RENEWED_S, "a renewal")
            world.check(error.renewal.done(), "a renewal does not end", sent.token, policy)
            program.world.note("renewed", repr(error.renewal.exception()))
    except bm.BandmasterError as error:
        program.judge(sent, error)
        world.check(not program.is_alone, "a call does not end as it should", sent.token, error)
        return
    else:
        world.check(not program.is_alone, "a call goes on that stands still", sent.token)
        return
    if program.is_alone:
        if policy == "raise" and plan.is_deaf:  # the rank is ended, after a while
            program.whole.restart()
        program.group.work(next(program.tokens))

"""Random histories of models with several groups of layers, and of conversations that go on behind states."""

from random import Random

from scheduler.cache_groups import ALL_TOKENS, CacheGroup, Lifetime, LifetimeKind
from scheduler.config import PreemptionMode
from scheduler.messages import SequenceId
from tests.fakes import continuation, make_sequence
from tests.properties.lengths import TIMES, seeds
from tests.properties.test_scheduler_histories import check_ends, play, random_history
from tests.world import World, small_config


def test_groups_of_layers_under_memory_pressure_leave_every_request_its_own_tokens() -> None:
    num_taps = num_restored = num_swaps = num_host_hits = 0
    for seed in seeds(30):
        random = Random(seed)
        groups = [
            CacheGroup(ALL_TOKENS, random.randint(1, 2)),
            CacheGroup(Lifetime(LifetimeKind.WINDOW, random.randint(1, 9)), random.randint(1, 2)),
            CacheGroup(Lifetime(LifetimeKind.FIXED), random.randint(1, 4)),
        ]
        config = small_config(
            num_blocks=random.randint(30, 60),
            max_num_seqs=random.randint(2, 6),
            preemption_mode=random.choice(list(PreemptionMode)),
            num_host_blocks=random.choice([0, 30, 90]),
            copy_s_per_block=random.choice([0.0, 0.2]),
            groups=tuple(random.sample(groups, random.randint(2, 3))),
            max_plans_in_flight=random.randint(1, 3),
            encoder_cache_tokens=6,
            max_adapters=2,
            max_drafts=3,
        )
        world = World(config, max_drafts=random.choice([0, 0, 3]))
        accepted = play(world, random_history(random))
        check_ends(world, accepted)
        num_taps += sum(len(plan.taps) for plan in world.worker.plans)
        num_swaps += world.num_swaps()
        num_host_hits += world.scheduler.stats().num_prefix_host_hits
        if any(group.lifetime.kind is LifetimeKind.FIXED for group in config.groups):
            num_restored += world.scheduler.stats().num_prefix_hits
    assert num_taps > 100 * TIMES, "the histories are too easy"
    assert num_restored > 300 * TIMES
    assert num_swaps > 10 * TIMES
    assert num_host_hits > 20 * TIMES


def test_conversations_go_on_rightly_behind_turns_that_are_left_while_a_step_computes() -> None:
    num_found = num_left_with_drafts = 0
    for seed in seeds(20):
        random = Random(seed)
        groups = [CacheGroup(ALL_TOKENS), CacheGroup(Lifetime(LifetimeKind.FIXED), random.randint(1, 2))]
        block_size = random.choice([1, 3, 4])
        config = small_config(
            groups=tuple(groups[-random.randint(1, 2) :]),
            num_blocks=random.choice([60, 200]) * (3 if block_size == 1 else 1),
            block_size=block_size,
            max_model_len=400,
            max_plans_in_flight=random.randint(1, 3),
            max_drafts=3,
        )
        world = World(config, max_drafts=3)
        texts = [[1, 2, 3], [1, 2, 4]]
        for number in range(1, 17):
            text = texts[number % 2]
            world.add(make_sequence(number, text, max_tokens=random.randint(4, 12)))
            for _ in range(random.randint(0, 6)):
                world.step()
            plan = world.step(abort_meanwhile=number)
            num_left_with_drafts += SequenceId(number) in plan.draft_token_ids
            if random.random() < 0.5:
                world.run()
            tokens = world.tokens[SequenceId(number)]
            assert tokens == continuation(text, len(tokens))
            text += continuation(text, len(tokens) + random.randint(0, 3)) + [number] * random.randint(1, 3)
        world.run()
        num_found += world.scheduler.stats().num_prefix_hits
    assert num_left_with_drafts > 30 * TIMES, "the histories are too easy"
    assert num_found > 100 * TIMES

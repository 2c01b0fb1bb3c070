"""A plan arrives at a rank as it was made."""

from dataclasses import replace

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.nodes.rank_plans import encode_plan
from scheduler.input_messages import EncoderInput, Payload
from scheduler.messages import (
    BlockCopy,
    BlockId,
    Grammar,
    GrammarKind,
    NewSequence,
    NewTable,
    PoolingParams,
    PoolingTask,
    Preemption,
    PreemptionCause,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    SequenceId,
    StateTap,
)

EMPTY = SchedulerOutput(
    step=0, released=(), new_sequences=(), new_blocks={}, scheduled=(), num_scheduled_tokens=0
)
FULL = SamplingParams(
    temperature=0.7,
    logit_bias=((5, -1.5),),
    seed=2**64 - 1,
    num_logprobs=3,
    num_prompt_logprobs=0,
    bad_words=((1, 2), (3,)),
    allowed_token_ids=(7, 8),
    grammar=Grammar(kind=GrammarKind.REGEX, text="a+", begins_after=4, cost_s=0.25),
    stop_token_ids=(2,),
)

ids = st.integers(0, 2**40).map(SequenceId)
blocks = st.integers(0, 2**31).map(BlockId)
block_ids = st.lists(blocks, max_size=5).map(tuple)
token_ids = st.lists(st.integers(0, 2**20), max_size=8).map(tuple)
copies = st.lists(st.builds(BlockCopy, blocks, blocks), max_size=3).map(tuple)
preemptions = st.builds(
    Preemption,
    ids,
    st.sampled_from(PreemptionCause),
    st.booleans(),
    ids,
    st.integers(0, 99),
    st.integers(0, 9),
)
numbers = st.integers(0, 99)
inputs = st.lists(
    st.builds(EncoderInput, st.integers(0, 9), st.integers(1, 9), st.text(max_size=3)), max_size=2
).map(tuple)
payloads = st.builds(
    Payload, st.text(max_size=3), st.text(max_size=3), numbers, st.tuples(numbers, numbers, numbers)
)
new_sequences = st.builds(
    NewSequence,
    sequence_id=ids,
    token_ids=token_ids,
    num_prompt_tokens=st.integers(0, 8),
    params=st.sampled_from((SamplingParams(), FULL, replace(FULL, grammar=None))),
    tables=st.lists(st.builds(NewTable, block_ids, st.integers(0, 9)), max_size=2).map(tuple),
    pooling=st.sampled_from((None, PoolingParams(task=PoolingTask.EMBED, num_dimensions=8))),
    adapter=st.text(max_size=5),
    prediction=token_ids,
    scope=st.tuples(st.text(max_size=3), st.text(max_size=3)),
    encoder_inputs=inputs,
    payloads=st.lists(payloads, max_size=2).map(tuple),
)
plans = st.builds(
    SchedulerOutput,
    step=st.integers(0, 2**40),
    released=st.lists(ids, max_size=3).map(tuple),
    new_sequences=st.lists(new_sequences, max_size=3).map(tuple),
    new_blocks=st.dictionaries(ids, st.tuples(block_ids, block_ids), max_size=3),
    scheduled=st.lists(
        st.builds(ScheduledSequence, ids, st.integers(0, 99), st.integers(1, 9), st.booleans()), max_size=3
    ).map(tuple),
    num_scheduled_tokens=st.integers(0, 2**20),
    swap_out=copies,
    swap_in=copies,
    copies=copies,
    taps=st.lists(st.builds(StateTap, ids, st.integers(0, 99), block_ids), max_size=2).map(tuple),
    preemptions=st.lists(preemptions, max_size=2).map(tuple),
    draft_choice=st.none(),
    draft_token_ids=st.dictionaries(ids, token_ids, max_size=2),
    encoder_inputs=st.dictionaries(ids, inputs, max_size=2),
    encoder_slice_s=st.sampled_from((0.0, 0.05)),
    num_drafts_wanted=st.dictionaries(ids, st.integers(1, 16), max_size=2),
)


decode_plan = msgspec.msgpack.Decoder(SchedulerOutput).decode


@given(plan=plans)
@settings(max_examples=60, deadline=None)
def test_each_field_of_a_plan_arrives(plan: SchedulerOutput) -> None:
    arrived = decode_plan(encode_plan(plan))
    assert arrived == plan
    assert all(type(each) is NewSequence for each in arrived.new_sequences)


def test_a_plan_without_drafts_and_encoder_inputs_can_be_sent() -> None:
    assert decode_plan(encode_plan(EMPTY)) == EMPTY

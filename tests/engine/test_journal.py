"""A request's record is written once, and stays small."""

from engine.journal import Journal, JournalStage
from scheduler.messages import FinishReason, SequenceId

FIRST, SECOND = SequenceId(1), SequenceId(2)


def stages(journal: Journal) -> list[JournalStage]:
    return [event.stage for event in journal.events]


def test_a_request_with_two_prompts_is_one_story() -> None:
    journal = Journal("r")
    assert not journal.was_admitted
    for num_tokens in (3, 4):
        journal.note_admission(num_tokens, -1)
    for queue_s, num_cached, first_token_s in ((0.1, 2, 0.2), (0.3, 0, 0.4)):
        journal.note_start(queue_s)
        journal.note_cached_tokens(num_cached)
        journal.note_first_token(first_token_s)
    journal.note_end(FinishReason.STOP, 5)
    journal.note_end(FinishReason.LENGTH, 6)
    assert (journal.num_prompt_tokens, journal.num_cached_tokens, journal.num_output_tokens) == (7, 2, 11)
    assert (journal.queue_s, journal.first_token_s, journal.priority) == (0.1, 0.2, -1)
    assert journal.finish_reasons == [FinishReason.STOP, FinishReason.LENGTH]
    assert stages(journal) == ["queued", "started", "first_token", "finished", "finished"]


def test_preemptions_are_those_of_all_sequences_each_counted_once() -> None:
    journal = Journal()
    for sequence_id, num_so_far in ((FIRST, 1), (FIRST, 1), (SECOND, 1), (FIRST, 3)):
        journal.note_preemptions(sequence_id, num_so_far)
    assert journal.num_preemptions == 4
    assert stages(journal) == ["preempted"] * 3


def test_a_request_that_is_preempted_for_ever_stays_small() -> None:
    journal = Journal()
    for number in range(1, 1000):
        journal.note_preemptions(FIRST, number)
    assert journal.num_preemptions == 999
    assert len(journal.events) == 64

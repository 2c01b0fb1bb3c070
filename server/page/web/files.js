// The last minute as files: steps and requests for `tokenyard trace` and `simulate`, and a Chrome trace.

import { nameOf } from "./words.js";

export function stepLines(history) {
  return history.steps.map(({ isAfterGap, ...step }) => JSON.stringify(step)).join("\n") + "\n";
}

// Requests as `tokenyard simulate --requests` reads them. Those still under way count with the reply so far.
export function requestLines(history) {
  const lives = [...history.lives.values()].filter((life) => life.arrived !== null && life.prompt);
  const began = Math.min(...lives.map((life) => life.arrived));
  return lives
    .sort((one, other) => one.arrived - other.arrived)
    .map((life) => JSON.stringify({ arrival_s: life.arrived - began, prompt_len: life.prompt, output_len: Math.max(life.output, 1), priority: life.priority, tenant: life.tenant }))
    .join("\n") + "\n";
}

const MICRO = 1e6;

// Chrome's trace event format: a row of steps, a row for each request, counters, and arrows for preemptions.
export function chromeTrace(history) {
  const events = [{ ph: "M", pid: 1, name: "process_name", args: { name: "engine" } }, { ph: "M", pid: 2, name: "process_name", args: { name: "requests" } },
    { ph: "M", pid: 1, tid: 1, name: "thread_name", args: { name: "steps" } }];
  for (const step of history.steps) {
    const ts = step.time_s * MICRO;
    const isPrefill = step.num_tokens > step.num_decodes;
    events.push({ ph: "X", pid: 1, tid: 1, ts, dur: (step.schedule_s + step.execute_s + step.update_s) * MICRO, name: isPrefill ? (step.num_decodes ? "mixed" : "prefill") : "decode",
      args: { step: step.step, tokens: step.num_tokens, decodes: step.num_decodes } });
    events.push({ ph: "C", pid: 1, ts, name: "requests", args: { running: step.num_running, waiting: step.num_waiting, swapped: step.num_swapped } });
    events.push({ ph: "C", pid: 1, ts, name: "KV blocks", args: { used: step.num_used_blocks } });
    step.preemptions.forEach((each, place) => {
      const id = step.step * 1000 + place;
      events.push({ ph: "s", pid: 2, tid: each.beneficiary, ts, id, name: "preemption", cat: "preemption" });
      events.push({ ph: "f", bp: "e", pid: 2, tid: each.sequence_id, ts: ts + 1, id, name: "preemption", cat: "preemption", args: each });
    });
  }
  const end = history.frames.at(-1)?.time_s ?? 0;
  for (const life of history.lives.values()) {
    events.push({ ph: "M", pid: 2, tid: life.id, name: "thread_name", args: { name: nameOf(life) } });
    const slice = (name, from, to) => to > from && events.push({ ph: "X", pid: 2, tid: life.id, ts: from * MICRO, dur: (to - from) * MICRO, name, args: { priority: life.priority, tenant: life.tenant } });
    let waitsFrom = life.arrived;
    for (const spell of life.spells) {
      if (spell.from !== null) {
        if (waitsFrom !== null) slice("waits", waitsFrom, spell.from);
        slice("runs", spell.from, spell.to ?? end);
      }
      waitsFrom = spell.away ? spell.to : null;
    }
    if (waitsFrom !== null && life.ended === null) slice("waits", waitsFrom, end);
  }
  return JSON.stringify({ traceEvents: events, displayTimeUnit: "ms" });
}

export const someSettings = (view) => `base,${view.policy === "priority" ? "fcfs" : "priority"},num_blocks=${view.stats.num_blocks * 2},load=1.5`;

export function whatIf(view, settings) {
  const config = `--num-blocks ${view.stats.num_blocks} --block-size ${view.block_size} --max-num-seqs ${view.max_num_seqs} --scheduling-policy ${view.policy}`;
  return `tokenyard trace yard-steps.jsonl\ntokenyard simulate --fit yard-steps.jsonl --requests yard-requests.jsonl \\\n  ${config} \\\n  --compare ${settings}`;
}

// What the yard has seen: views, steps and the life of each request, the last 60 seconds of them.

export const SPAN_S = 60;
const FULL_VIEW = 64;  // steps of a view; later ones are there for their preemptions
const MAX_STEPS = 20000;
const MAX_LIVES = 4000;

export class History {
  constructor() { this.clear(); }

  clear() {
    this.frames = [];
    this.steps = [];
    this.lives = new Map();
    this.events = [];
    this.numDropped = 0;
    this.hasGap = false;
  }

  take(view) {
    const last = this.frames.at(-1);
    if (last && (view.time_s < last.time_s || view.view <= last.view)) this.clear();  // another engine process
    this.numDropped += view.num_dropped_steps;
    view.steps.forEach((step, place) => {
      step.isAfterGap = (place === 0 && this.hasGap) || place >= FULL_VIEW;
      this.#takeStep(step);
    });
    this.hasGap = view.num_dropped_steps > 0;
    for (const report of view.running) this.#takeReport(report, view);
    for (const report of view.waiting) this.#takeReport(report, view);
    this.#takeEnds(view);
    view.steps = null;  // they are in this.steps
    this.frames.push(view);
    this.#forget(view.time_s - SPAN_S);
  }

  lifeOf(id) {
    let life = this.lives.get(id);
    if (!life) {
      life = { id, request: "", tenant: "", priority: 0, prompt: 0, output: 0, arrived: null, spells: [], ended: null };
      this.lives.set(id, life);
      if (this.lives.size > MAX_LIVES) this.lives.delete(this.lives.keys().next().value);
    }
    return life;
  }

  // Steps up to a moment, the newest last.
  stepsUntil(timeS) {
    let high = this.steps.length;
    while (high && this.steps[high - 1].time_s > timeS) high -= 1;
    return this.steps.slice(0, high);
  }

  #takeStep(step) {
    this.steps.push(step);
    for (const id of step.arrived) this.lifeOf(id).arrived ??= step.time_s;
    for (const [id, request] of step.requests) this.lifeOf(id).request = request;
    const sentAway = new Set();
    for (const each of step.preemptions) {
      sentAway.add(each.sequence_id);
      const life = this.lifeOf(each.sequence_id);
      const spell = life.spells.at(-1);
      if (spell && spell.to === null) Object.assign(spell, { to: step.time_s, away: each });
      else life.spells.push({ from: null, to: step.time_s, away: each });
      this.events.push({ time_s: step.time_s, step: step.step, ...each });
    }
    for (const id of step.new) this.lifeOf(id).spells.push({ from: step.time_s, to: null, away: null });
    for (const id of step.released) if (!sentAway.has(id)) this.#end(id, step.time_s);
    for (const id of step.ended) this.#end(id, step.time_s, true);
  }

  #takeReport(report, view) {
    const life = this.lifeOf(report.sequence_id);
    life.request = report.request_id || life.request;
    life.tenant = report.tenant;
    life.priority = report.priority;
    life.prompt = report.num_prompt_tokens;
    life.output = report.num_output_tokens;
    life.arrived = view.time_s - report.age_s;
    life.ended = null;
    life.lastView = view.view;
  }

  // The steps tell ends late, or not at all if no step follows: whoever is in no line any more has ended.
  #takeEnds(view) {
    if (view.running.length < view.stats.num_running || view.waiting.length < view.stats.num_waiting + view.stats.num_swapped) return;
    for (const life of this.lives.values()) {
      if (life.ended === null && life.lastView !== undefined && life.lastView !== view.view) this.#end(life.id, view.time_s);
    }
  }

  #end(id, timeS, isAborted = false) {
    const life = this.lives.get(id);
    if (!life || life.ended !== null) return;
    life.ended = timeS;
    life.isAborted = isAborted;
    const spell = life.spells.at(-1);
    if (spell && spell.to === null) spell.to = timeS;
  }

  #forget(beforeS) {
    const drop = (list) => { let num = 0; while (num < list.length && list[num].time_s < beforeS) num += 1; if (num) list.splice(0, num); };
    drop(this.frames);
    drop(this.steps);
    drop(this.events);
    if (this.steps.length > MAX_STEPS) this.steps.splice(0, this.steps.length - MAX_STEPS);
    for (const [id, life] of this.lives) if (life.ended !== null && life.ended < beforeS) this.lives.delete(id);
  }
}

// The two canvases of the yard: the strip of steps and the grid of KV blocks.

export const hueOf = (id) => Math.round((Number(id) * 137.508) % 360);
export const colourOf = (id, isDark) => `hsl(${hueOf(id)} ${isDark ? "58% 60%" : "56% 48%"})`;

const FREE = 0, CACHED = 1, SHARED = 3;
const AXIS = 46;

export function paletteOf() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  return { prefill: of("prefill"), decode: of("decode"), idle: of("idle"), preempt: of("preempt"), cached: of("cached"), soft: of("soft"), line: of("line"), dim: of("dim"), ink: of("ink"), panel: of("panel"), isDark: style.colorScheme === "dark" };
}

// Size a canvas to its element, and return a context in CSS pixels.
function contextOf(canvas, height) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width];
}

const stepMs = (step) => 1000 * (step.schedule_s + step.execute_s + step.update_s);

function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= value);
}

// Columns: steps, with a wide one for each pause of the engine.
function columnsOf(steps, most) {
  const columns = [];
  let ended = null;
  for (const step of steps.slice(-most)) {
    const idleMs = ended === null ? 0 : 1000 * (step.time_s - ended);
    if (step.isAfterGap) columns.push({ isGap: true, idleMs });
    else if (idleMs > 50) columns.push({ idleMs });
    columns.push({ step, ms: stepMs(step) });
    ended = step.time_s + stepMs(step) / 1000;
  }
  return columns;
}

// Draw the last 300 steps; returns a function from x to what stands there.
export function drawStrip(canvas, steps, palette, selected) {
  const height = 132;
  const [context, width] = contextOf(canvas, height);
  const most = Math.max(40, Math.min(300, Math.floor((width - AXIS) / 2.4)));
  const columns = columnsOf(steps, most);
  const units = columns.reduce((sum, column) => sum + (column.step ? 1 : 5), 0);
  const unit = Math.min(9, (width - AXIS) / Math.max(units, most));
  const top = 24, base = height - 6;
  const times = columns.filter((column) => column.step).map((column) => column.ms).sort((a, b) => a - b);
  const most_ms = times.length ? Math.max(times[Math.floor((times.length - 1) * 0.98)], times.at(-1) / 4, 0.1) : 1;
  const scale = niceCeiling(most_ms);
  const y = (ms) => base - (base - top) * Math.min(1, ms / scale);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  for (const part of [0, 0.5, 1]) {
    context.fillStyle = palette.line;
    context.fillRect(AXIS, Math.round(y(scale * part)), width - AXIS, 1);
    context.fillStyle = palette.dim;
    context.textAlign = "right";
    context.fillText(part ? `${+(scale * part).toPrecision(3)} ms` : "0", AXIS - 6, y(scale * part) - (part ? 0 : 2));
  }
  let x = width - unit * units;
  const places = [];
  for (const column of columns) {
    const wide = (column.step ? 1 : 5) * unit;
    places.push([x, x + wide, column]);
    if (column.step) drawStep(context, column, { x, wide, y, base, top, palette, selected });
    else {
      context.fillStyle = palette.idle;
      if (column.isGap) for (let at = x + 1; at < x + wide - 1; at += 4) context.fillRect(at, base - 3, 2, 3);
      else context.fillRect(x, base - 8, Math.max(wide - 1, 1), 8);
      if (wide > 22 && !column.isGap) { context.textAlign = "center"; context.fillText(column.idleMs < 1000 ? `${Math.round(column.idleMs)}ms` : `${(column.idleMs / 1000).toFixed(1)}s`, x + wide / 2, base - 16); }
    }
    x += wide;
  }
  return (at) => places.find(([from, to]) => at >= from && at < to)?.[2];
}

function drawStep(context, { step, ms }, { x, wide, y, base, top, palette, selected }) {
  const decodes = step.num_decodes / Math.max(step.num_tokens, 1);
  const gap = wide > 3 ? 1 : 0;
  const height = Math.max(base - y(ms), 1.5);
  const isOfSelected = selected === null || step.decodes.some(([id]) => id === selected) || step.chunks.some(([id]) => id === selected);
  context.globalAlpha = isOfSelected ? 1 : 0.25;
  context.fillStyle = palette.prefill;
  context.fillRect(x, base - height, wide - gap, height * (1 - decodes));
  context.fillStyle = palette.decode;
  context.fillRect(x, base - height * decodes, wide - gap, height * decodes);
  context.globalAlpha = 1;
  if (!step.preemptions.length) return;
  const middle = x + wide / 2;
  context.fillStyle = palette.preempt;
  const tip = Math.max(y(ms) - 1, top);
  context.fillRect(middle - 0.75, tip - 16, 1.5, 12);
  context.beginPath();
  context.moveTo(middle - 4.5, tip - 6); context.lineTo(middle + 4.5, tip - 6); context.lineTo(middle, tip);
  context.fill();
  if (step.preemptions.length > 1) { context.textAlign = "center"; context.fillText(String(step.preemptions.length), middle, tip - 22); }
}

// Draw all blocks; returns a function from a point to what stands there.
export function drawBlocks(canvas, runs, numBlocks, palette, { selected, isShown }) {
  const height = 200;
  const [context, width] = contextOf(canvas, height);
  if (!numBlocks) return () => null;
  let size = Math.max(4, Math.min(44, Math.floor(Math.sqrt((width * height) / numBlocks))));
  while (size > 4 && Math.floor(width / size) * Math.floor(height / size) < numBlocks) size -= 1;
  const across = Math.floor(width / size), down = Math.floor(height / size);
  const perCell = Math.ceil(numBlocks / (across * down));
  const cells = new Array(Math.ceil(numBlocks / perCell));
  let block = 0;
  for (const [length, use, owner] of runs) {
    for (let num = 0; num < length; num += 1, block += 1) {
      const cell = Math.floor(block / perCell);
      if (!cells[cell] || use > cells[cell].use) cells[cell] = { use, owner, block };
    }
  }
  const inner = size - (size > 5 ? 1.5 : 1);
  cells.forEach((cell, place) => {
    const x = (place % across) * size, y = Math.floor(place / across) * size;
    if (cell.use === FREE) {
      context.fillStyle = palette.soft;
    } else if (cell.use === CACHED) {
      context.fillStyle = palette.cached;
    } else {
      context.fillStyle = colourOf(cell.owner, palette.isDark);
      context.globalAlpha = (selected === null || selected === cell.owner) && isShown(cell.owner) ? 1 : 0.22;
    }
    context.fillRect(x, y, inner, inner);
    if (cell.use === SHARED) {
      context.strokeStyle = palette.ink;
      context.lineWidth = Math.max(1, size / 9);
      context.beginPath();
      context.moveTo(x, y + inner); context.lineTo(x + inner, y);
      if (size > 9) { context.moveTo(x, y + inner / 2); context.lineTo(x + inner / 2, y); context.moveTo(x + inner / 2, y + inner); context.lineTo(x + inner, y + inner / 2); }
      context.stroke();
    }
    context.globalAlpha = 1;
  });
  return (x, y) => {
    const place = Math.floor(y / size) * across + Math.floor(x / size);
    return x < across * size && cells[place] ? { ...cells[place], perCell, first: place * perCell } : null;
  };
}

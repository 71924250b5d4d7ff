// The text of /metrics as numbers, and what has changed between two of them.

const SAMPLE = /^compiled_engine:(\w+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

// Name -> list of { labels, value }.
export function parse(text) {
  const figures = new Map();
  for (const line of text.split("\n")) {
    const found = SAMPLE.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) labels[name] = value;
    if (!figures.has(found[1])) figures.set(found[1], []);
    figures.get(found[1]).push({ labels, value: Number(found[3]) });
  }
  return figures;
}

export function valueOf(figures, name) {
  return figures.get(name)?.[0]?.value ?? 0;
}

export function grown(now, before, name) {
  return valueOf(now, name) - valueOf(before, name);
}

// [label's value, growth], those that have grown most first.
export function grownBy(now, before, name, label) {
  const old = new Map((before.get(name) ?? []).map((each) => [each.labels[label], each.value]));
  return (now.get(name) ?? [])
    .map((each) => [each.labels[label], each.value - (old.get(each.labels[label]) ?? 0)])
    .filter(([, growth]) => growth > 0)
    .sort((one, other) => other[1] - one[1]);
}

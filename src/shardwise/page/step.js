/** The timeline and memory of a step, with the controls that choose step, ranks and unit. */

import { addChart } from "charts";
import { index, loadStep, secondsText } from "data";
import { MemoryChart, peakOf } from "memory";
import { Timeline } from "timeline";
import { View } from "view";

const get = (id) => document.getElementById(id);
const view = new View();
const timeline = new Timeline(view);
const memory = new MemoryChart(view);
let step = null;

function addOptions(select, options) {
  for (const [value, text] of options) select.add(new Option(text, value));
}

/** Parse the ranks in a text such as "all" or "0-7, 12" to positions; throws an error message. */
function parseRanks(text) {
  if (["", "all"].includes(text.trim().toLowerCase())) return index.ranks.map((_, position) => position);
  const wanted = new Set();
  for (const part of text.split(",")) {
    const match = part.trim().match(/^(\d+)(?:\s*-\s*(\d+))?$/);
    if (!match) throw new Error(`expected all, or numbers and ranges such as 0-7, 12; got ${part.trim()}`);
    const [low, high] = [Number(match[1]), Number(match[2] ?? match[1])];
    index.ranks.forEach((rank, position) => rank >= low && rank <= high && wanted.add(position));
  }
  if (!wanted.size) throw new Error(`no such rank: this run has ${index.ranks.length}`);
  return [...wanted].sort((a, b) => a - b);
}

function showRanks() {
  const error = get("rank-filter-error");
  error.textContent = "";
  try {
    timeline.setRanks(parseRanks(get("rank-filter").value));
  } catch (wrong) {
    error.textContent = wrong.message;
  }
  get("rank-filter").setAttribute("aria-invalid", String(error.textContent !== ""));
}

async function showStep() {
  step = await loadStep(Number(get("step").value));
  timeline.setStep(step);
  showRanks();
  view.showAll();
  memory.show(step, Number(get("memory-rank").value));
}

function showUnit(unit) {
  get("unit").value = unit === null ? "" : unit;
  timeline.setUnit(unit);
  for (const button of document.querySelectorAll("tbody button[data-unit]")) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.unit) === unit));
  }
}

function showRank(rank) {
  const position = index.ranks.indexOf(rank);
  if (!timeline.ranks.includes(position)) get("rank-filter").value = "all";
  showRanks();
  timeline.scrollToRow(timeline.ranks.indexOf(position));
  get("memory-rank").value = position;
  memory.show(step, position);
}

function positionOfHighestPeak() {
  const peaks = step.ranks.map((rank) => peakOf(rank.memory)?.bytes ?? 0);
  return peaks.indexOf(Math.max(...peaks));
}

function listen() {
  get("step").addEventListener("change", showStep);
  get("rank-filter").addEventListener("change", showRanks);
  get("unit").addEventListener("change", ({ target }) => showUnit(target.value === "" ? null : Number(target.value)));
  get("memory-rank").addEventListener("change", ({ target }) => memory.show(step, Number(target.value)));
  get("zoom-in").addEventListener("click", () => view.zoom(1 / 1.6));
  get("zoom-out").addEventListener("click", () => view.zoom(1.6));
  get("fit").addEventListener("click", () => view.showAll());
  get("longest").addEventListener("click", () => timeline.selectLongestWait());
  for (const button of document.querySelectorAll("button[data-unit], button[data-rank]")) {
    button.addEventListener("click", () => {
      const { unit, rank } = button.dataset;
      if (rank !== undefined) showRank(Number(rank));
      else showUnit(button.getAttribute("aria-pressed") === "true" ? null : Number(unit));
      get("timeline").scrollIntoView();
    });
  }
}

/** Draw the charts and the last step, because the first ones of a run are slower; handle buttons. */
export async function start() {
  for (const chart of index.charts) addChart(get("charts"), chart);
  const label = (step) => `${step.step}: ${secondsText(step.stepSeconds)}, ${secondsText(step.exposedSeconds)} exposed`;
  addOptions(get("step"), index.steps.map((step, number) => [number, label(step)]));
  addOptions(get("unit"), index.labels.slice(0, index.numUnits).map((label, number) => [number, label]));
  addOptions(get("memory-rank"), index.ranks.map((rank, position) => [position, rank]));
  get("step").value = index.steps.length - 1;
  listen();
  await showStep();
  get("memory-rank").value = positionOfHighestPeak();
  memory.show(step, Number(get("memory-rank").value));
  requestAnimationFrame(() => requestAnimationFrame(() => {
    document.documentElement.dataset.ready = performance.now().toFixed(0); // milliseconds to the first drawing
  }));
}

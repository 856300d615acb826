import { addChart } from "charts";
import { index } from "data";
import { ready, startStep } from "step";
import { makeFilterable, makeSortable } from "tables";

const get = (id) => document.getElementById(id);

makeSortable(get("candidates-table"));
makeFilterable(get("candidates-table"), get("candidate-filter"), get("candidate-count"), "configurations");
for (const chart of index.charts) addChart(get("charts"), chart);
await startStep();
ready();

import { addChart } from "charts";
import { index } from "data";
import { ready, startStep } from "step";
import { makeFilterable, makeSortable } from "tables";

const get = (id) => document.getElementById(id);

makeSortable(get("units-table"));
makeSortable(get("ranks-table"));
makeFilterable(get("units-table"), get("unit-filter"), get("unit-count"));
get("run").hidden = index.charts.length === 0;
for (const chart of index.charts) addChart(get("charts"), chart);
await startStep();
ready();

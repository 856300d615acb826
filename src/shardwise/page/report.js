import { index } from "data";
import { start } from "step";
import { makeFilterable, makeSortable } from "tables";

const get = (id) => document.getElementById(id);

makeSortable(get("units-table"));
makeSortable(get("ranks-table"));
makeFilterable(get("units-table"), get("unit-filter"), get("unit-count"));
get("run").hidden = index.charts.length === 0;
await start();

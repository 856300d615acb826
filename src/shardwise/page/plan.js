import { start } from "step";
import { makeFilterable, makeSortable } from "tables";

const get = (id) => document.getElementById(id);

makeSortable(get("candidates-table"));
makeFilterable(get("candidates-table"), get("candidate-filter"), get("candidate-count"), "configurations");
await start();

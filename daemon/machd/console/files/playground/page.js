import { html, render } from "/console/vendor/htm-preact.js";

render(html`<main><h1>machd</h1></main>`, document.getElementById("page"));

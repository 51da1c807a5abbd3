// Helpers and the end of a page in test_report_page.py: STEPS are its functions.
const find = selector => document.querySelector(selector);
const count = selector => document.querySelectorAll(selector).length;
const style = (selector, name) => getComputedStyle(find(selector))[name];
const source = () => [find(".source .what").innerText, find(".here").innerText];
function click(selector) {
  find(selector).scrollIntoView({block: "center", inline: "center"});
  const box = find(selector).getBoundingClientRect();
  const hit = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  hit.dispatchEvent(new MouseEvent("click", {bubbles: true, cancelable: true}));
}
function at(time) {
  const slider = find("input[type=range]");
  slider.value = time;
  slider.dispatchEvent(new Event("input"));
  return [find(".now").innerText, Number(find(".later").getAttribute("x"))];
}
addEventListener("load", async () => {
  const values = [];
  for (const step of [STEPS]) {
    values.push(step() ?? null);
    await new Promise(done => setTimeout(done, 10));  // for the page's own events
  }
  const element = document.createElement("pre");
  element.textContent = JSON.stringify([...values, faults]);
  element.id = "values";
  document.body.append(element);
});

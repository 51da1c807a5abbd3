// Sections that are on another page now. The plugin of redirects keeps an anchor, but not the page that has it.
const MOVED = {
  "how-to/train/layers/#coming-from-megatron-core": "how-to/migrate/layers/#coming-from-megatron-core",
  "how-to/train/layers/#coming-from-transformerengine": "how-to/migrate/layers/#coming-from-transformerengine",
  "how-to/train/layers/#the-layers": "reference/layers/",
  "how-to/train/layers/#initialisation": "reference/layers/#initialisation",
  "how-to/train/experts/#in-torchtitan": "how-to/migrate/experts/#in-torchtitan",
  "how-to/train/experts/#in-megatron-core": "how-to/migrate/experts/#in-megatron-core",
  "how-to/train/experts/#order-of-rows": "reference/expert-rows/#order-of-rows",
  "how-to/train/experts/#arguments": "reference/expert-rows/#arguments",
  "how-to/train/experts/#algorithms": "reference/expert-rows/#algorithms",
  "how-to/train/experts/#gradients-and-graphs": "reference/expert-rows/#gradients-and-graphs",
  "how-to/compile/torch-compile/#the-prediction": "how-to/compile/passes/#the-prediction",
  "how-to/compile/torch-compile/#without-ranks-localtensor": "how-to/compile/passes/#without-ranks-localtensor",
  "how-to/compile/torch-compile/#torchs-own-fused-ops-on-a-cpu": "how-to/compile/symm-mem/",
  "how-to/compile/torch-compile/#torchs-fused-ops": "how-to/compile/symm-mem/",
  "how-to/compile/aot/#the-manifest": "reference/bundle-manifest/",
  "how-to/gpu/bench/#what-is-measured": "explanation/performance/#what-is-measured",
  "how-to/gpu/first-run/#places": "explanation/places/",
  "how-to/run/hangs/#timeouts": "reference/environment/#timeouts",
  "how-to/run/hangs/#environment-variables": "reference/environment/#environment-variables",
  "tutorials/fused-kernel/#the-laws": "explanation/fused-op/#the-laws",
  "tutorials/fused-kernel/#the-life-of-a-chunk": "explanation/fused-op/#the-life-of-a-chunk",
  "tutorials/fused-kernel/#what-a-compiler-makes-of-it": "tutorials/fused-kernel/#compile-it-for-a-gpu",
  "tutorials/first-race/#torchs-handle": "how-to/check/peers/#torchs-handle",
  "tutorials/first-race/#a-deadlock": "how-to/check/schedules/#a-deadlock",
  "tutorials/first-race/#lint": "reference/lint/",
  "tutorials/first-race/#a-protocol-before-it-is-a-kernel": "how-to/check/protocols/",
  "tutorials/first-race/#in-your-tests": "how-to/check/tests-and-ci/#in-your-tests",
  "tutorials/first-race/#in-a-pull-request": "how-to/check/tests-and-ci/#in-a-pull-request",
  "tutorials/first-race/#which-check-catches-what": "explanation/checks/",
  "tutorials/first-race/#limits": "explanation/checks/#limits",
  "explanation/performance/#the-fused-ops-on-one-host": "reference/measurements/#the-fused-ops-on-one-host",
  "explanation/performance/#the-backend-on-one-host": "reference/measurements/#the-backend-on-one-host",
  "explanation/performance/#loops-of-the-kernels-counted": "reference/loop-counts/",
  "explanation/performance/#warps-with-roles-counted": "reference/warp-roles/#warps-with-roles-counted",
  "explanation/model/#predicted-8-ranks": "reference/predictions/#predicted-8-ranks",
  "explanation/model/#predicted-chunks-and-orders": "reference/predictions/#predicted-chunks-and-orders",
  "explanation/model/#predicted-2-to-128-nodes": "reference/predictions/#predicted-2-to-128-nodes",
  "explanation/model/#sensitivity-to-guesses": "reference/predictions/#sensitivity-to-guesses",
  "explanation/model/#what-depends-on-guesses": "reference/predictions/#sensitivity-to-guesses",
  "explanation/model/#parameters-of-h100x8": "reference/predictions/#parameters-of-h100x8",
  "reference/kernel-counts/#the-loops": "reference/loop-counts/#the-loops",
  "reference/kernel-counts/#products-of-block-scaled-operands-counted": "reference/loop-counts/#products-of-block-scaled-operands-counted",
  "reference/kernel-counts/#rows-in-flight": "reference/rows-in-flight/",
  "reference/kernel-counts/#warps-with-roles-counted": "reference/warp-roles/#warps-with-roles-counted",
  "reference/measurements/#several-hosts": "reference/measurements-hosts/#several-hosts",
  "reference/measurements/#messages-between-two-ranks": "reference/measurements-hosts/#messages-between-two-ranks",
  "reference/compatibility/#upgrades-of-interlace": "how-to/run/upgrade/",
  "reference/collectives/#for-all-dtypes": "reference/api/collectives/#for-all-dtypes",
  "reference/collectives/#parts-of-different-lengths": "reference/api/collectives/#parts-of-different-lengths",
  "reference/collectives/#between-two-ranks": "reference/api/collectives/#between-two-ranks",
  "reference/collectives/#barriers": "reference/api/collectives/#barriers",
  "reference/collectives/#objects": "reference/api/collectives/#objects",
  "reference/collectives/#several-tensors-at-once": "reference/api/collectives/#several-tensors-at-once",
};

const SITE = new URL(".", document.currentScript.src);

function follow() {
  const here = decodeURIComponent(location.href.slice(SITE.href.length));
  if (here in MOVED) location.replace(new URL(MOVED[here], SITE));
}

follow();
addEventListener("hashchange", follow);

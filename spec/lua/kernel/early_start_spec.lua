--- Kernels that are printed in CUDA start early, so they wait before they do anything
-- (kernels/cuda/programmatic.cuh). The rest of their text needs no look then.
local kernel = require "kvlab.kernel.run.kernel"
local kv = require "kvlab"
local kernel_hook = require "kvlab.kernel.run.hook"
local policy = require "kvlab.policy.policy"
local source_text = require "kvlab.kernel.print.source_text"

local BEGIN = "^{%s*const [%w_]+ %*a = &args;%s*let_next_start%(%);"
  .. "%s*wait_for_previous%(%);"

--- The kernels of a text, and how many of them do not wait first.
local function count(text)
  local all, wrong = 0, 0
  for at in text:gmatch "kvl_code%b()%s*(){" do
    all = all + 1
    if not text:find(BEGIN, at) then wrong = wrong + 1 end
  end
  return all, wrong
end

--- Calls see(plan) with the plan of every kernel that a shipped policy opens, over the
-- layers and KV heads of the recall model, whose heads duo knows.
local function each_plan(see)
  local open, cpu = kernel.open, kv.device "cpu"
  for _, name in ipairs(policy.names()) do
    local p = kv.policy(name)
    kernel.chosen, kernel.open = "lua", function(plan, dev)
      see(name, plan)
      return open(plan, dev)
    end
    local ok, why = pcall(kv.scope, function()
      policy.attach(p, { device = cpu, layers = 4, blocks = 8, kv_heads = 2, heads = 8,
        head_dim = 64, block_size = 16, dtype = "bf16", max_blocks = 8, scale = 1 })
      kernel_hook.emitters(p.prefill and p or {}, p)
    end)
    kernel.chosen, kernel.open = nil, open
    if not ok then error(why, 0) end
  end
end

describe("a kernel that is printed in CUDA", function()
  it("waits before anything else", function()
    local places = {}
    each_plan(function(name, plan)
      if plan.place == "hook" then return end -- part of attention, whose PTX is checked
      local all, wrong = count(kernel.print(plan, "sm_90a"))
      assert.equal(1, all, name)
      assert.equal(0, wrong, name .. ", " .. plan.place)
      places[plan.place] = (places[plan.place] or 0) + 1
    end)
    for _, place in ipairs { "summary", "score" } do
      assert.is_true((places[place] or 0) > 2, place)
    end
  end)

  it("waits when its text is a policy's", function()
    local made = source_text.whole({ name = "mine", cuda = "void mine() {}", list = {},
      dims = {}, block = 32 }, "cuda", '1 "mine.lua"')
    local all, wrong = count(made)
    assert.equal(1, all)
    assert.equal(0, wrong)
  end)

  it("is found out if it does not", function()
    local text = "kvl_code(const __grid_constant__ arguments args) {\n"
      .. "  const arguments *a = &args;\n  let_next_start();\n"
      .. "  %s  wait_for_previous();\n}"
    assert.same({ 1, 0 }, { count(text:format "") })
    assert.same({ 1, 1 }, { count(text:format "*(int *)a->out = 0;\n") })
  end)
end)

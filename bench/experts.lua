--- A layer of experts in the shapes of models that have them, for the tokens of decode
-- steps and of prompts (X1). Each token's choice is random. Limit: a plain read of the
-- weights of all experts that some token chose, or the flops of all pairs of token and
-- choice. On the CPU there are fewer experts and tokens (Bench:shrunk), and none of
-- DeepSeek-V3, whose matrices would still take 1.4 GB.
local kv = require "kvlab"
local paged = require "bench.lib.paged"

local SHAPES = {
  { "GLM-4.7-Flash", hidden = 2048, inner = 1536, experts = 64, active = 4 },
  { "Qwen3-30B-A3B", hidden = 2048, inner = 768, experts = 128, active = 8 },
  { "DeepSeek-V3", hidden = 7168, inner = 2048, experts = 256, active = 8,
    needs_gpu = true },
}

--- Choices of n tokens, each of different experts, and how many experts they name.
local function choices(n, experts, active)
  local state, list, is_chosen, count = 12345, {}, {}, 0
  for _ = 1, n do
    local taken = {}
    for _ = 1, active do
      local e
      repeat
        state = (state * 48271) % 2147483647
        e = math.floor(state / 2147483647 * experts)
      until not taken[e]
      taken[e] = true
      list[#list + 1] = e
      if not is_chosen[e] then is_chosen[e], count = true, count + 1 end
    end
  end
  return list, count
end

local function case(shape, n)
  return function(b)
    local hidden, inner, active = shape.hidden, shape.inner, shape.active
    local experts = math.max(active, b:shrunk(shape.experts))
    local function random(seed, ...)
      return kv.randn(b.device, "bf16", { ... }, { seed = seed, std = hidden ^ -0.5 })
    end
    local list, count = choices(n, experts, active)
    local chosen = kv.from(b.device, "i32", { n, active }, list)
    local weights = kv.full(b.device, "f32", { n, active }, 1 / active)
    local x = kv.randn(b.device, "bf16", { n, hidden }, { seed = 1 })
    local gate_up = random(2, experts, 2 * inner, hidden)
    local down = random(3, experts, hidden, inner)
    local out = kv.full(b.device, "bf16", { n, hidden }, 0 / 0)
    local function run() kv.ops.experts(x, chosen, weights, gate_up, down, out) end
    local pair = 6 * hidden * inner
    return { run = run, bytes = count * pair + 2 * x:bytes(), flops = n * active * pair,
      check = function()
        run()
        local row, sum = x:narrow(n - 1, 1)
        for j = 1, active do
          local e = list[(n - 1) * active + j]
          local between = kv.tensor(b.device, "bf16", { 1, inner })
          kv.ops.linear(row, gate_up:index(e), between, "swiglu")
          local y = between:matmul_t(down:index(e)):cast "f32" * (1 / active)
          sum = sum and sum + y or y
        end
        paged.expect("the last token", out:narrow(n - 1, 1), sum, 0.02)
      end }
  end
end

return function(b)
  for _, shape in ipairs(SHAPES) do
    local before
    for _, tokens in ipairs { 1, 16, 64, 512, 4096 } do
      local n = b:shrunk(tokens)
      if n ~= before and not (shape.needs_gpu and b.kind == "cpu") then
        b:case { id = "X1", setup = case(shape, n),
                 name = ("experts of %s, tokens: %d"):format(shape[1], n) }
      end
      before = n
    end
  end
end

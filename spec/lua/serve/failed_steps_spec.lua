--- A server goes on after a step that failed: server:run() again gives every request the
-- tokens that it gets alone, and the store holds under each key what a run without
-- failures puts there. A request whose own function raises ends alone.
local kv = require "kvlab"
local support = require "spec.support"
local tiny = require("spec.models.tiny").tiny

local C = kv.C
local cpu = kv.device "cpu"
local model = tiny(cpu)
local BLOCK = 4
local TOLERANCE = 1e-4 -- of K and V: f32 sums in another order, on values up to about 5

--- Prompts of several lengths; some begin alike.
local function workload()
  local list = {}
  for i, length in ipairs { 30, 9, 33, 1, 30, 17 } do
    local tokens = {}
    for t = 1, length do tokens[t] = (t * 31 + (t > 16 and i or i % 2) * 7) % 97 end
    list[i] = { tokens = tokens, max_tokens = 5 + 2 * i }
  end
  return list
end

local function open(case, store)
  local policy = kv.policy(case.policy or "quest", { ratio = 0.5 })
  local e = model:engine { blocks = 80, block_size = BLOCK, chunk = 16, max_seqs = 4,
                           policy = policy, offload = case.offload }
  return { engine = e, policy = policy, store = store,
           server = kv.serve { engine = e, store = store } }
end

--- Runs the server until nothing fails any more. Returns how often it raised.
local function run(s)
  local raised = 0
  for _ = 1, 500 do
    local ok, why = pcall(s.server.run, s.server)
    C.kvl_interrupt(0)
    if ok then return raised end
    raised = raised + 1
    assert(why:find("it fails", 1, true) or why:find("interrupted", 1, true), why)
  end
  error "the server never came to an end"
end

--- The workload served, with fail(s) before it runs. Returns the requests' tokens, how
-- often run raised, and the state.
local function serve(case, list, fail, store)
  local s = open(case, store)
  local requests = {}
  for i, one in ipairs(list) do requests[i] = assert(s.server:submit(one)) end
  if fail then fail(s, requests) end
  local raised = run(s)
  local outputs = {}
  for i, r in ipairs(requests) do outputs[i] = r:output() end
  local free = s.server.scheduler.prefix:available()
  s.server:close()
  assert.equal(s.engine.cache.blocks, free)
  s.engine.cache:close()
  return outputs, raised, requests
end

local function served_alone(case)
  local want = {}
  for i, one in ipairs(workload()) do want[i] = serve(case, { one })[1] end
  return want
end

-- ---- failures -------------------------------------------------------------------------

--- Calls fn, which may raise, at every `period`-th call of owner[name], before its work,
-- and at others after its work; with is_before, never after it.
local function now_and_then(owner, name, period, fn, is_before)
  local own, calls = owner[name], 0
  owner[name] = function(...)
    calls = calls + 1
    if calls % period == 0 then fn() end
    local result, second, third, fourth = own(...)
    if not is_before and calls % period == math.floor(period / 2) then fn() end
    return result, second, third, fourth
  end
end

local function fails() error("it fails", 0) end
local function interrupt() C.kvl_interrupt(1) end

local FAILURES = {
  ["a hook of the policy"] = function(s)
    now_and_then(s.policy, "select_blocks", 11, fails)
  end,
  ["the end of a layer"] = function(s)
    now_and_then(s.engine.attention, "forward", 13, fails)
  end,
  ["the logits"] = function(s)
    now_and_then(s.server.executor.engine, "decode", 3, fails)
    now_and_then(s.server.executor.engine, "prefill_batch", 4, fails)
  end,
  ["an interrupt in a layer"] = function(s)
    now_and_then(s.engine.attention, "forward", 17, interrupt)
  end,
  ["an interrupt before a block is stored"] = function(s)
    now_and_then(s.server.executor, "put", 5, interrupt)
  end,
  ["the store's search"] = function(s)
    now_and_then(s.server.executor, "find", 6, fails)
  end,
  ["the admission"] = function(s) now_and_then(s.server.executor, "begin", 3, fails) end,
  ["the prefetch"] = function(s)
    now_and_then(s.server.executor, "submit", 2, fails, true)
  end,
  ["the end of a request"] = function(s)
    now_and_then(s.server.executor, "finished", 3, fails)
  end,
  ["an interrupt in a sampler"] = function(_, requests)
    for i, r in ipairs(requests) do
      local calls = 0
      r.sample = function(row)
        calls = calls + 1
        if calls % 4 == i % 4 then
          C.kvl_interrupt(1)
          error("interrupted", 0)
        end
        return row:argmax():item()
      end
    end
  end,
}
local CASES = {
  { policy = "quest" }, { policy = "h2o_blocks" }, { policy = "gsa" },
  { policy = "keydiff_blocks" },
  { policy = "quest", offload = { slots = 2, slot_blocks = 2 } },
  { policy = "gsa", offload = { slots = 2, slot_blocks = 2, hot_slots = 160 } },
}

-- ---- the store ------------------------------------------------------------------------

--- Every block of the prompts and outputs as the store has it.
local function contents(store, list, outputs)
  local cache = kv.cache { device = cpu, format = "f32", layers = 2, blocks = 1,
    block_size = BLOCK, kv_heads = 2, head_dim = 16 }
  local found = {}
  for i, one in ipairs(list) do
    local tokens = { unpack(one.tokens) }
    for _, id in ipairs(outputs[i]) do tokens[#tokens + 1] = id end
    local keys, n = store:keys(tokens)
    for b = 0, n - 1 do
      for layer = 0, cache.layers - 1 do
        if store:get_block(keys + b, layer, cache:layer(layer), 0) then
          found[("%d %d %d"):format(i, b, layer)] = cache:layer(layer):list()
        end
      end
    end
  end
  cache:close()
  return found
end

-- ---- specs ----------------------------------------------------------------------------

for _, case in ipairs(CASES) do
  local where = case.offload and (case.offload.hot_slots and "hot cache" or "ring")
    or "resident"
  describe(("a server, %s, %s,"):format(case.policy, where), function()
    local want
    -- What is in a store after the workload was served twice: the second time it has the
    -- prompts.
    local function twice(fail)
      local store, raised = kv.store("memory:", { model = "tiny", block_size = BLOCK }), 0
      for _ = 1, 2 do
        local output, count = serve(case, workload(), fail, store)
        raised = raised + count
        assert.same(want, output)
      end
      local found = contents(store, workload(), want)
      store:close()
      return found, raised
    end
    local right
    lazy_setup(function()
      want = served_alone(case)
      local raised
      right, raised = twice()
      assert.equal(0, raised)
    end)

    for _, name in ipairs(support.names(FAILURES)) do
      it("goes on after steps that fail in " .. name, function()
        local found, raised = twice(FAILURES[name])
        assert.same(support.names(right), support.names(found))
        for key, numbers in pairs(right) do
          support.close(found[key], numbers, TOLERANCE, 0, key)
        end
        -- h2o_blocks watches the prompts, so nothing is brought from a store
        if not (case.policy == "h2o_blocks" and name == "the prefetch") then
          assert.is_true(raised > 0)
        end
      end)
    end
  end)
end

describe("a request of a server", function()
  --- The workload, in which request 3 has `its` functions.
  local function with(its)
    local list = workload()
    for name, fn in pairs(its) do list[3][name] = fn end
    return list
  end

  local want
  lazy_setup(function() want = served_alone {} end)

  local function check(its, words, length)
    local outputs, raised, requests = serve({}, with(its))
    assert.equal(0, raised)
    for i, r in ipairs(requests) do
      if i == 3 then
        assert.equal("error", r.finish_reason)
        assert.matches(words, tostring(r.error))
        assert.equal(length, r:output_length())
      else
        assert.is_nil(r.error)
        assert.equal("length", r.finish_reason)
        assert.same(want[i], outputs[i])
      end
    end
  end

  it("whose on_token raises ends alone, with its error", function()
    local calls = 0
    check({ on_token = function()
      calls = calls + 1
      if calls == 4 then error "my own" end
    end }, "failed_steps_spec.lua:%d+: my own", 4)
    assert.equal(4, calls)
  end)

  describe("whose logits hold NaN", function()
    -- The last token that request 3 reads is one that no other request has.
    local poison, embedding, before

    local function poisoned(its)
      local list = with(its or {})
      list[3].tokens[#list[3].tokens] = poison
      return list
    end

    lazy_setup(function()
      local is_taken = {}
      for i, one in ipairs(workload()) do
        for _, id in ipairs(one.tokens) do is_taken[id] = true end
        for _, id in ipairs(want[i]) do is_taken[id] = true end
      end
      poison = 0
      while is_taken[poison] do poison = poison + 1 end
      local head = model.embedding:clone() -- which stays as it is
      model.logits = function(_, states, out) states:matmul_t(head, out) end
      embedding = model.embedding:index(poison)
      before = embedding:clone()
    end)
    lazy_teardown(function() model.logits = nil end)
    before_each(function() embedding:fill_(0 / 0) end)
    after_each(function() embedding:copy_(before) end)

    local function check_poisoned(its)
      local outputs, raised, requests = serve({}, poisoned(its))
      assert.equal(0, raised)
      for i, r in ipairs(requests) do
        if i == 3 then
          assert.equal("error", r.finish_reason)
          assert.equal("request 3: the model's logits for token 1 of its output hold NaN",
            r.error)
          assert.same({}, outputs[i])
        else
          assert.is_nil(r.error)
          assert.equal("length", r.finish_reason)
          assert.same(want[i], outputs[i])
        end
      end
    end

    it("ends alone, with an error that says so, however its tokens are chosen", function()
      check_poisoned()
      check_poisoned { temperature = 0.8, seed = 3 }
      check_poisoned { temperature = 0.8, top_k = 10, top_p = 0.9, logprobs = 2 }
      check_poisoned { draft = {} }
    end)

    it("ends alone when they are those of its prompt", function()
      local _, raised, requests = serve({}, (function()
        local list = poisoned { prompt_logprobs = 1 }
        list[3].tokens[#list[3].tokens + 1] = 1
        return list
      end)())
      assert.equal(0, raised)
      assert.matches("^request 3: .* logits for token %d+ of its prompt hold NaN$",
        requests[3].error)
      for i, r in ipairs(requests) do
        if i ~= 3 then assert.same(want[i], r:output()) end
      end
    end)

    it("keeps the tokens before them", function()
      embedding:copy_(before)
      local list = { workload()[3] }
      local third = model.embedding:index(want[3][3])
      local own = third:clone()
      list[1].on_token = function(r)
        if r:output_length() == 3 then third:fill_(0 / 0) end
      end
      local outputs, _, requests = serve({}, list)
      third:copy_(own)
      assert.equal("request 1: the model's logits for token 4 of its output hold NaN",
        requests[1].error)
      assert.same({ want[3][1], want[3][2], want[3][3] }, outputs[1])
    end)
  end)

  it("whose sample raises ends alone, with its error", function()
    check({ sample = function() error "no sample" end }, "no sample", 0)
  end)

  it("whose sample returns no token ends alone, with what it returned", function()
    for shown, value in pairs { ["nil"] = false, ["1.5"] = 1.5, ["97"] = 97 } do
      check({ sample = function(row, r)
        if r:output_length() == 2 then return value or nil end
        return row:argmax():item()
      end }, "sample returned " .. shown .. ", expected a token id, 0 ... 96", 2)
    end
  end)
end)

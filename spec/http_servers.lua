--- Servers with a small random model, for specs of HTTP.
local kv = require "kvlab"
local text_models = require "spec.text_models"
local tiny = require("spec.models.tiny").tiny

local cpu = kv.device "cpu"
local family = tiny(cpu)
family.head = kv.randn(cpu, "f32", { 97, 32 }, { seed = 5, std = 0.5 })
function family.logits(self, states, out) states:matmul_t(self.head, out) end
family.config.context = 256

local M = { family = family, tokenizer = text_models.tokenizer(97) }

local opened = {}

function M.engine(o)
  o = o or {}
  o.blocks, o.block_size, o.chunk = o.blocks or 96, 4, o.chunk or 16
  o.max_seqs = o.max_seqs or 8
  return family:engine(o)
end

--- Opens a server.
---@param o? table          options of kv.http_server
---@param of_engine? table  … of its engine
function M.open(o, of_engine)
  o = o or {}
  local engine = M.engine(of_engine)
  o.model = { engine_for = function() return engine end, name = "tiny",
              tokenizer = o.tokenizer or M.tokenizer }
  o.port, o.tokenizer = 0, nil
  local server = kv.http_server(o)
  opened[#opened + 1] = { server, engine.cache }
  return server
end

--- Closes all servers; in each, nothing may be left.
function M.close_all()
  for _, one in ipairs(opened) do
    local server, cache = one[1], one[2]
    server:close()
    assert(cache:pages_free() == cache.pages, "pages of the cache are lost")
    cache:close()
  end
  opened = {}
end

return M

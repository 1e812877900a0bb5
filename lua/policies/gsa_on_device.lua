--- GSA on-device: the blocks whose keys hash most like the query, chosen without the
-- host.
-- Source  UCM's GSA on-device (KVComp); its option names. It hashes every token, takes
--         the nearest token of a block, averages a group's queries before hashing, and
--         makes one list for all KV heads of a layer: per = "token", heads = "shared".
--         The defaults are what its guide tells: a hash a block, of the mean key
-- Score   minus the bits in which two hashes by random planes differ
-- Cost    one launch; reads hash_bits / 8 bytes a block and KV head, or a token; no
--         scores in memory, no host synchronisation
-- Fails   few bits: angles are known to about 1 / sqrt(hash_bits); a key's length is not
--         seen at all; hashes of means as block_mean does
local kv = require "kvlab"
local one_of = kv.policy.one_of

return kv.policy.define {
  name = "gsa_on_device", prefill = false, decode = true,
  defaults = {
    ratio = 0.3, sink = 1, recent = 2, min_blocks = 0, hash_bits = 64, hash_planes = 0,
    hash_cache_size = 10000, per = "block", heads = "kv", planes = "orthogonal", seed = 0,
  },
  aliases = { sparse_ratio = "ratio", local_window_sz = "recent",
              init_window_sz = "sink" },
  takes = {
    per = one_of("block", "token"), heads = one_of("kv", "shared"),
    planes = one_of("orthogonal", "gaussian"),
  },

  init = function(self, shape)
    self.hashes = kv.hash.summary(shape, {
      bits = self.hash_bits, per = self.per, planes = self.planes, seed = self.seed,
      hash_planes = self.hash_planes > 0 and self.hash_planes or nil,
      cache_size = self.hash_cache_size,
    })
  end,
  on_prefill_offload = function(self, ev) self.hashes:update(ev) end,
  on_decode_offload = function(self, ev) self.hashes:update(ev) end,
  keep_block = function(self, key, block) self.hashes:store(key, block) end,
  recall_block = function(self, key, block) return self.hashes:restore(key, block) end,
  select_blocks = function(self, ctx)
    return ctx:select_nearest(self.hashes, self.budget, self.heads == "shared")
  end,
  score_bytes = function(self) return self.hashes:bytes_block() end,
}

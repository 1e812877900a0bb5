--- Queue position: who runs sooner is served sooner.
-- Source  UCM GSA's sketch of a prefetch engine: URGENT 0, HIGH 1, NORMAL 2, LOW 3
-- Reads   view.queue_position
-- Cost    a comparison or three
-- Fails   within a level it is first come, first served, however long the transfer
return function(_, view)
  local position = view.queue_position
  if position == 0 then return 0 end
  if position <= 4 then return 1 end
  return position <= 16 and 2 or 3
end

--- Queue position: the requests that run sooner get their blocks sooner.
-- Source  UCM GSA's sketch of a prefetcher: URGENT 0, HIGH 1, NORMAL 2, LOW 3
-- Reads   view.queue_position
-- Cost    one to three comparisons
-- Fails   within a level it is first come, first served, however long the transfer takes
return function(_, view)
  local position = view.queue_position
  if position == 0 then return 0 end
  if position <= 4 then return 1 end
  return position <= 16 and 2 or 3
end

#!/bin/sh
# Start `sidestep` in a container. A new cache volume first gets the kernels of the image; those that
# it has already stay.
kernels=${KERNELS_OF_IMAGE:-/opt/sidestep/kernels}
mkdir -p "$TMPDIR" "$TRITON_CACHE_DIR"
# Each file appears whole. Without one of them the start only takes longer.
for entry in "$kernels"/*; do
    name=${entry##*/}
    [ -e "$TRITON_CACHE_DIR/$name" ] && continue
    cp -R "$entry" "$TRITON_CACHE_DIR/.new-$$" && mv "$TRITON_CACHE_DIR/.new-$$" "$TRITON_CACHE_DIR/$name"
done
exec sidestep "$@"

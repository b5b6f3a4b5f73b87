#!/bin/bash
# Emulated Linux with a software RDMA device, to run verbs on a host without RDMA hardware. It needs no root and no KVM,
# and a network only for the first build.
#
#   guest.sh build                  build the guest from Debian's packages, once; prints the reason if this fails
#   guest.sh run SCRIPT [QEMU...]   boot it, run SCRIPT in it and print the output; exit status 0 if that of SCRIPT is 0
#
# The guest sees the host's files at the same paths; its changes are dropped. So the project's Python and native module
# run unchanged. DS_EXT_GUEST_CACHE: folder of the guest. DS_EXT_GUEST_ENV="A=1 B=2": environment of the script.
# DS_EXT_GUEST_LIMIT_S: time limit in seconds.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
cache=${DS_EXT_GUEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ds_ext/rdma_guest}
packages=(libibverbs1 librdmacm1 ibverbs-providers python3-pyverbs libibverbs-dev)
modules=(virtio_pci virtio_net 9pnet_virtio 9p overlay crc32_generic ib_uverbs rdma_ucm rdma_rxe dummy sch_netem)

say_missing() {
  echo "the guest cannot be built: $1" >&2
  exit 3
}

need() {
  command -v "$1" >/dev/null || PATH=$PATH:/usr/sbin:/sbin command -v "$1" >/dev/null ||
    say_missing "there is no $1 (Debian: apt install --no-install-recommends $2)"
}

build() {
  [ "$(uname -m)" = x86_64 ] || say_missing "it runs this host's programs, and they are for $(uname -m)"
  for pair in qemu-system-x86_64:qemu-system-x86 rdma:iproute2 tc:iproute2; do need "${pair%:*}" "${pair#*:}"; done
  mkdir -p "$(dirname "$cache")"
  exec 9>"$cache.lock"
  flock 9 # another build may be under way
  [ ! -e "$stamp" ] || return 0
  for pair in busybox:busybox-static cpio:cpio depmod:kmod dpkg:dpkg apt-get:apt strip:binutils; do
    need "${pair%:*}" "${pair#*:}"
  done
  export PATH=$PATH:/usr/sbin:/sbin
  rm -rf "$cache" && mkdir -p "$cache/packages" "$cache/kernel" "$cache/userland"
  cd "$cache/packages"
  local kernel version work
  kernel=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends: linux-image-[0-9]/{print $2; exit}')
  [ -n "$kernel" ] || say_missing "apt knows no package linux-image-amd64; this needs Debian, and apt-get update"
  version=${kernel#linux-image-}
  timeout 300 apt-get download -qq -o APT::Sandbox::User=root "$kernel" "${packages[@]}" ||
    say_missing "Debian's packages cannot be downloaded"
  tar_of_kernel | tar x -C ../kernel --wildcards './boot/vmlinuz*' '*/modules.*' '*/kernel/drivers/virtio' \
    '*/kernel/drivers/infiniband/core' '*/kernel/drivers/infiniband/sw/rxe' '*/kernel/fs/9p' '*/kernel/fs/netfs' \
    '*/kernel/fs/fscache' '*/kernel/fs/overlayfs' '*/kernel/fs/configfs' '*/kernel/net/9p' '*/kernel/net/ipv4' \
    '*/kernel/net/ipv6' '*/kernel/net/sched' '*/kernel/net/core' '*/kernel/crypto' '*/kernel/lib' \
    '*/kernel/drivers/net/dummy.ko*' '*/kernel/drivers/net/virtio_net.ko*' '*/kernel/drivers/net/net_failover.ko*' \
    2>/dev/null || true # patterns that this kernel has nothing for
  for package in lib*.deb ibverbs*.deb python3*.deb; do dpkg -x "$package" ../userland; done
  cd "$cache"
  depmod -b kernel "$version" 2>/dev/null
  work=$cache/files
  mkdir -p "$work"/{bin,sbin,dev,proc,sys,host,lower/host,lower/userland,upper} "$work/lib/modules/$version"
  cp "$(command -v busybox)" "$work/bin/"
  for module in "${modules[@]}"; do modprobe -d kernel -S "$version" --show-depends "$module"; done |
    awk '$1 == "insmod" {print $2}' | sort -u | while read -r file; do
    inside=lib/modules/${file#*/lib/modules/}
    mkdir -p "$work/$(dirname "$inside")"
    strip --strip-debug -o "$work/$inside" "$file" # signatures too: to check them takes an emulator seconds
  done
  depmod -b "$work" "$version" 2>/dev/null
  install -m 755 "$here/guest_init.sh" "$work/init"
  (cd "$work" && find . | cpio -oH newc --quiet -R 0:0) >initrd
  cp kernel/boot/vmlinuz* vmlinuz
  rm -rf kernel packages "$work"
  touch "$stamp"
}

tar_of_kernel() { dpkg --fsys-tarfile linux-image-*.deb; }

# Names the recipe: another guest is made when it changes.
stamp=$cache/$( (declare -f build && echo "${packages[@]}" "${modules[@]}" && cat "$here/guest_init.sh") | cksum | tr ' ' -)

run() {
  local script=$1 log status=0
  shift
  [ -e "$stamp" ] || say_missing "it was not built: run guest.sh build"
  log=$(mktemp)
  # One virtual core: with more, the emulator is slower and the software device starves. Its time is counted in
  # instructions, so that time limits in the guest mean the same on a busy host.
  timeout -k 5 "${DS_EXT_GUEST_LIMIT_S:-120}" qemu-system-x86_64 -accel tcg -cpu max -smp 1 -icount shift=2 \
    -m "${DS_EXT_GUEST_MB:-1024}" -nodefaults -no-reboot -nographic -serial stdio \
    -kernel "$cache/vmlinuz" -initrd "$cache/initrd" \
    -append "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check cryptomgr.notests script=$(realpath "$script") ${DS_EXT_GUEST_ENV:-}" \
    -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
    -virtfs local,path="$cache/userland",mount_tag=userland,security_model=none,readonly=on \
    "$@" </dev/null 2>&1 | tee "$log" || true
  grep -q '^GUEST ENDED WITH 0' "$log" || status=1
  rm -f "$log"
  exit $status
}

"$@"

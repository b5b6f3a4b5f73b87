#!/bin/busybox sh
# Init program of the guest: mount the host's files under a writable layer in memory, load the software RDMA device and
# run the script from the kernel's command line.
/bin/busybox --install -s /bin
ln -s /bin/busybox /sbin/modprobe
export PATH=/bin:/sbin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
# crc32_generic must be loaded before rdma_rxe, which cannot load it.
for module in virtio_pci 9pnet_virtio 9p overlay virtio_net crc32_generic ib_uverbs rdma_ucm rdma_rxe dummy sch_netem; do
  modprobe $module
done
options=trans=virtio,version=9p2000.L,ro,msize=500000,cache=loose
mount -t 9p -o $options host /lower/host
mount -t 9p -o $options userland /lower/userland
mount -t tmpfs -o size=512m tmpfs /upper
mkdir /upper/files /upper/work
mount -t overlay -o lowerdir=/lower/userland:/lower/host,upperdir=/upper/files,workdir=/upper/work overlay /host
mount --rbind /dev /host/dev
mkdir -p /host/dev/shm
mount -t proc proc /host/proc
mount --rbind /sys /host/sys
for directory in dev/shm run var/tmp; do mount -t tmpfs tmpfs /host/$directory; done
ip link set lo up
script=$(sed -n 's/.*script=\([^ ]*\).*/\1/p' /proc/cmdline)
variables=$(sed 's/.*script=[^ ]*//' /proc/cmdline)
echo "GUEST STARTED"
chroot /host /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root PYTHONDONTWRITEBYTECODE=1 $variables \
  /bin/bash "$script"
echo "GUEST ENDED WITH $?"
poweroff -f

#!/bin/sh
# The first process of a node's namespaces: makes them look like a machine of their own, says so
# by creating $dir/ready, and then only reaps orphans. Started by sandbox.py as
#   unshare --mount --net --pid --fork --mount-proc --propagation private sandbox.sh DIR NODE SERVICE
# Every mount below exists in this mount namespace alone and ends with its last process.
set -eu
dir=$1 node_address=$2 service_address=$3

# --- files: what containerd, kubelet and pods write goes below $dir ---------------------------
# /dev first, as a bind of $dir/root/dev: a device node that a simulator makes or removes there is
# at once in /dev as well, which is where containerd looks up the devices of a container.
mount --bind /dev/pts "$dir/root/dev/pts"
mount -t tmpfs tmpfs "$dir/root/dev/shm"
mount --rbind "$dir/root/dev" /dev
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$dir/etc,workdir=$dir/etc.work" /etc
# No DNS answers: a program that looks a name up anyway is refused at once, not after a minute.
rm -f /etc/resolv.conf # may be a link to somewhere in /run
echo "nameserver 127.0.0.1" >/etc/resolv.conf
mount --bind "$dir/run" /run
mount --bind "$dir/varlog" /var/log
mount --bind "$dir/varlib" /var/lib
mount --bind "$dir/kubelet" /var/lib/kubelet

# The kubelet sets these for the whole machine. It finds its own values in files instead, and the
# machine keeps its settings.
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
    file="$dir/sysctl/$(echo "${setting%%=*}" | tr / .)"
    echo "${setting#*=}" >"$file"
    mount --bind "$file" "/proc/sys/${setting%%=*}"
done

# Pods may ask for mount propagation; "private" at first cut the peer group with the host.
mount --make-rshared /

# --- network: nothing leaves it; the service address works without kube-proxy. A second node
# gets to it, and to the first one, by a cable between their bridges (Sandbox.connect) -----------
ip link set lo up
[ -z "$service_address" ] || ip address add "$service_address/32" dev lo
ip link add node0 type bridge # some kernels have no dummy devices
ip address add "$node_address/32" dev node0
ip link set node0 up
ip route add default dev node0

touch "$dir/ready"
while :; do sleep 3600; done

#!/bin/bash
# Process 1 of a machine of the cluster, in namespaces of its own: what is mounted, started or bridged here ends with it.
# DIR has what the test has written: certificates, kubeconfigs, configurations; each program's log comes to DIR/log.
set -eu
dir=$1 bin=$2 ip=$3 group=$4 name=$5

# The host sees none of the mounts. Here they are shared, as mountPropagation: Bidirectional asks for. Daemons that serve the
# host's mounts shall end with those, and not with their copies here.
mount --make-rprivate /
awk '$3 ~ /^fuse/ { print $2 }' /proc/mounts | while IFS= read -r mount; do umount --lazy --no-canonicalize --internal-only "$(printf %b "$mount")"; done
mount --make-rshared /
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
for d in lib log; do
	mount --bind "$dir/$d" "/var/$d"
	mount --make-private "/var/$d" # else what is mounted there would be mounted in DIR, too
	mount --make-shared "/var/$d"
done

# A kubelet sets these to such values. They are the machine's, so it gets files to write to.
n=0
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
	n=$((n + 1))
	echo "${setting#*=}" >"$dir/setting$n"
	mount --bind "$dir/setting$n" "/proc/sys/${setting%=*}"
done

# All containers are in one control group, which the test removes.
for hierarchy in $(awk '$3 == "cgroup" { print $2 }' /proc/mounts); do
	mkdir -p "$hierarchy/$group"
	case $hierarchy in *cpuset*) for f in cpuset.cpus cpuset.mems; do cat "$hierarchy/$f" >"$hierarchy/$group/$f"; done ;; esac
done

# Pods are on the bridge that the test's host is on: nothing is routed or translated. With an address of its own it does not take
# those of pods that come and go.
ip link del pods 2>/dev/null || true # of the machine before it was started again
ip link add pods address "02:00:00:00:00:1${name#node}" type bridge stp_state 0 forward_delay 0
ip addr flush dev eth0
ip link set eth0 master pods
ip addr add "$ip/24" dev pods
ip link set pods up

run() { "$@" >"$dir/log/$(basename "$1").log" 2>&1 & }
# What the test kills is started again, as systemd would.
again() { while :; do "$@" >>"$dir/log/$(basename "$1").log" 2>&1 || sleep 0.1; done & }
again containerd --config "$dir/containerd.toml"
if [ "$name" = node0 ]; then
	run etcd --data-dir "$dir/etcd" --unsafe-no-fsync --listen-client-urls "http://$ip:2379" --advertise-client-urls "http://$ip:2379" --listen-peer-urls http://127.0.0.1:2380
	run "$bin/kube-apiserver" --etcd-servers="http://$ip:2379" --bind-address="$ip" --advertise-address="$ip" --secure-port=6443 \
		--tls-cert-file="$dir/apiserver.crt" --tls-private-key-file="$dir/apiserver.key" --token-auth-file="$dir/tokens.csv" --anonymous-auth=false \
		--authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged=true --service-cluster-ip-range=10.96.0.0/24 \
		--service-account-key-file="$dir/accounts.key" --service-account-signing-key-file="$dir/accounts.key" --service-account-issuer=https://kubernetes.default.svc \
		--kubelet-client-certificate="$dir/apiserver.crt" --kubelet-client-key="$dir/apiserver.key" --kubelet-preferred-address-types=InternalIP
	until "$bin/kubectl" --kubeconfig "$dir/admin.conf" get --raw /readyz >/dev/null 2>&1; do
		sleep 0.2
		kill -0 $!
	done
	run "$bin/kube-controller-manager" --kubeconfig="$dir/manager.conf" --leader-elect=false --bind-address=127.0.0.1 --use-service-account-credentials \
		--service-account-private-key-file="$dir/accounts.key" --root-ca-file="$dir/ca.crt"
	run "$bin/kube-scheduler" --kubeconfig="$dir/scheduler.conf" --leader-elect=false --bind-address=127.0.0.1
fi
again "$bin/kubelet" --config="$dir/kubelet.yaml" --kubeconfig="$dir/$name.conf" --hostname-override="$name" --node-ip="$ip" --v=2
# One that ends is missed: the machine ends with it.
wait -n
tail -n 3 "$dir"/log/*.log
exit 1

{{- define "shoal.probe" -}}
exec:
  command:
    - /usr/bin/shoal
    - health
    - unix:///run/shoal/feed.sock
    {{- if .Values.mount.enabled }}
    - /mnt/shoal/data
    {{- end }}
timeoutSeconds: 6
{{- end }}

{{/* A persistent cache has a folder for each job of each namespace, and for each of its pods: only one daemon at a time may own a folder.
None of the names has an underscore. */}}
{{- define "shoal.cacheDir" -}}
/var/cache/shoal/
{{- if or .Values.cache.hostPath .Values.cache.claim }}
{{- .Release.Namespace }}_{{ .Release.Name }}
{{- if gt (int .Values.parallelism) 1 }}_$(JOB_COMPLETION_INDEX){{ end }}
{{- else }}train{{ end }}
{{- end }}

{{/* With mount.enabled, the first sidecar, so that it is stopped last: it removes the dead mount of a killed
sidecar. The kubelet cannot remove a volume that contains a dead mount. */}}
{{- define "shoal.unmount" -}}
name: shoal-unmount
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
restartPolicy: Always
args: [umount, --at-exit, /mnt/shoal/data]
resources:
  requests:
    cpu: 10m
    memory: 64Mi
  limits:
    memory: 64Mi
securityContext:
  privileged: true
  runAsUser: 0
  readOnlyRootFilesystem: true
volumeMounts:
  - name: shoal-data
    mountPath: /mnt/shoal
    mountPropagation: Bidirectional
{{- end }}

{{- define "shoal.sidecar" -}}
name: shoal
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
restartPolicy: Always
args:
  - serve
  - {{ .Values.source | quote }}
  - --listen=unix:///run/shoal/feed.sock
  - --socket-group=65532
  - --cache-dir={{ include "shoal.cacheDir" . }}
  - {{ printf "--cache-size=%s" .Values.cache.size | quote }}
  - --memory=auto
  - --admin={{ if .Values.metrics.enabled }}0.0.0.0{{ else }}127.0.0.1{{ end }}:7071
  {{- if .Values.mount.enabled }}
  - --mount=/mnt/shoal/data
  - --allow-other
  {{- end }}
  {{- range .Values.extraArgs }}
  - {{ . | quote }}
  {{- end }}
{{- with .Values.env }}
env:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.metrics.enabled }}
ports:
  - name: admin
    containerPort: 7071
{{- end }}
startupProbe:
  {{- include "shoal.probe" . | nindent 2 }}
  periodSeconds: 1
  failureThreshold: 600
readinessProbe:
  {{- include "shoal.probe" . | nindent 2 }}
  periodSeconds: 10
livenessProbe:
  {{- include "shoal.probe" . | nindent 2 }}
  periodSeconds: 10
  failureThreshold: 6
resources:
  requests:
    cpu: {{ .Values.cpu | quote }}
    memory: {{ .Values.memory | quote }}
  limits:
    memory: {{ .Values.memory | quote }}
securityContext:
  readOnlyRootFilesystem: true
  {{- if .Values.mount.enabled }}
  privileged: true
  runAsUser: 0
  runAsGroup: 65532
  {{- else }}
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
  seccompProfile:
    type: RuntimeDefault
  {{- end }}
volumeMounts:
  - name: shoal-cache
    mountPath: /var/cache/shoal
  - name: shoal-run
    mountPath: /run/shoal
  - name: shoal-tmp
    mountPath: /tmp
  {{- if .Values.mount.enabled }}
  - name: shoal-data
    mountPath: /mnt/shoal
    mountPropagation: Bidirectional
  {{- end }}
{{- end }}

{{- define "shoal.trainerVolumeMounts" -}}
- name: shoal-run
  mountPath: /run/shoal
{{- if .Values.mount.enabled }}
- name: shoal-data
  mountPath: /mnt/shoal
  mountPropagation: HostToContainer
{{- end }}
{{- end }}

{{- define "shoal.volumes" -}}
- name: shoal-cache
  {{- if .Values.cache.hostPath }}
  hostPath:
    path: {{ .Values.cache.hostPath | quote }}
    type: Directory
  {{- else if .Values.cache.claim }}
  persistentVolumeClaim:
    claimName: {{ .Values.cache.claim | quote }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.cache.volume | quote }}
  {{- end }}
- name: shoal-run
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
- name: shoal-tmp
  emptyDir:
    medium: Memory
    sizeLimit: 16Mi
{{- if .Values.mount.enabled }}
- name: shoal-data
  emptyDir:
    sizeLimit: 1Mi
{{- end }}
{{- end }}

{{- define "shoal.podSecurityContext" -}}
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
{{- end }}

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

{{- define "shoal.sidecar" -}}
name: shoal
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
restartPolicy: Always
args:
  - serve
  - {{ .Values.source | quote }}
  - --listen=unix:///run/shoal/feed.sock
  - --socket-group=65532
  - --cache-dir=/var/cache/shoal/train
  - --cache-size={{ .Values.cacheSize }}
  - --memory=auto
  - --admin=0.0.0.0:7071
  {{- if .Values.mount.enabled }}
  - --mount=/mnt/shoal/data
  - --mkdir
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
ports:
  - name: admin
    containerPort: 7071
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
    memory: {{ .Values.memory }}
  limits:
    memory: {{ .Values.memory }}
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
  emptyDir:
    sizeLimit: {{ .Values.cacheVolume }}
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
